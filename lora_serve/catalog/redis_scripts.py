"""The scripts that change a catalog in Redis or Valkey, each in one step of the server.

    KEYS: meta, names, changes, replicas, heard, reports, unloaded (see redis_store.py)

A server that was started anew may have lost its last changes, or all. So `meta` names the run in
which its content was last agreed on, each client knows in which run it has last agreed, and every
script but WANTS and RESTORE refuses where the server's own run is another. Serials leap at each
new run, above all that a replica has seen: none that was lost is given again.
"""

from lora_serve.catalog.records import MAX_NUMBER, MAX_UNLOADED

ANEW = "started-anew"
SERIAL_LEAP = 2**20  # a run has fewer changes that could be lost; 2**53 / 2**20 runs are possible
MAX_SERIAL = MAX_NUMBER - 4 * SERIAL_LEAP  # in the server, so that none leaps beyond MAX_NUMBER
MAX_CHANGES = 4096
MAX_REPORTS = 16

NO_NUMBER = (
    "among its serials and generations, which are whole numbers below 2^53: another program has "
    "written to it; delete its keys, and servers restore it"
)

_HEAD = """
local meta, names, changes, replicas, heard, reports, unloaded =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local agreed = redis.call('HGET', meta, 'run')
local function written(number) return string.format('%.0f', number) end
local function number(value)
  local found = tonumber(value)
  return found and found >= 0 and found < MAX_NUMBER and found % 1 == 0 and found or nil
end
local function told(field) return redis.call('HGET', meta, field) or '0' end
local serial, first_generation = number(told('serial')), number(told('first_generation'))
if not serial or serial >= MAX_SERIAL or not first_generation then
  return redis.error_reply('ERR ' .. string.sub(told('serial'), 1, 20) .. ' and '
    .. string.sub(told('first_generation'), 1, 20) .. ' NO_NUMBER')
end
local function serial_of(text) return tonumber(string.match(text, '^%d+') or '0') end
local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local function append(kind, body, by)
  local last = serial
  serial = serial + (by or 1)
  redis.call('HSET', meta, 'serial', written(serial))
  redis.call('XADD', changes, 'MAXLEN', '~', MAX_CHANGES, written(serial) .. '-0',
    'previous', written(last), 'kind', kind, 'body', body)
end
local function count_report()
  local number = redis.call('HINCRBY', meta, 'reports', 1)
  redis.call('XADD', reports, 'MAXLEN', MAX_REPORTS, number .. '-0', 'n', '')
end
"""
_GUARD = f"""
if agreed ~= run or ARGV[#ARGV] ~= run then return redis.error_reply('{ANEW}') end
"""


_CONSTANTS = {
    "MAX_CHANGES": MAX_CHANGES,
    "MAX_NUMBER": MAX_NUMBER,
    "MAX_REPORTS": MAX_REPORTS,
    "MAX_SERIAL": MAX_SERIAL,
    "MAX_UNLOADED": MAX_UNLOADED,
    "LEAP": SERIAL_LEAP,
    "NO_NUMBER": NO_NUMBER,
}


def _script(body: str, *, guarded: bool = True) -> str:
    text = _HEAD + (_GUARD if guarded else "") + body
    for name, value in _CONSTANTS.items():
        text = text.replace(name, str(value))
    return text


# All scripts with a guard take the run in which their caller has agreed as their last argument.
CHECK = _script("return 1")

# ARGV: name. Returns its record, and the generation with which a name without one begins.
GET = _script("return {redis.call('HGET', names, ARGV[1]), written(first_generation)}")

# ARGV: name, expected serial, record without its serial, whether it was unloaded, its generation if
# that is all for which it would be kept then, else nothing.
PUT = _script("""
local current = redis.call('HGET', names, ARGV[1])
if serial_of(current or '') ~= tonumber(ARGV[2]) then return false end
append('record', ARGV[3])
redis.call('HSET', meta, 'changed', '1')
redis.call('ZREM', unloaded, ARGV[1])
if ARGV[4] == '1' and ARGV[5] ~= '' and tonumber(ARGV[5]) <= first_generation then
  redis.call('HDEL', names, ARGV[1])
else
  redis.call('HSET', names, ARGV[1], written(serial) .. ' ' .. ARGV[3])
  if ARGV[4] == '1' then redis.call('ZADD', unloaded, written(serial), ARGV[1]) end
end
if redis.call('ZCARD', unloaded) > MAX_UNLOADED then
  local name, since = unpack(redis.call('ZPOPMIN', unloaded))
  local record = redis.call('HGET', names, name) or ''
  -- else an earlier release has changed it since
  if serial_of(record) == tonumber(since) then
    redis.call('HDEL', names, name)
    local is_json, found = pcall(cjson.decode, string.match(record, '^%d+ (.*)$'))
    local generation = is_json and type(found) == 'table' and number(found['generation']) or 0
    if generation > first_generation then
      redis.call('HSET', meta, 'first_generation', written(generation))
    end
  end
end
return written(serial)
""")

SNAPSHOT = _script("""
return {written(serial), redis.call('HVALS', names), redis.call('HVALS', replicas),
  written(first_generation)}
""")

# ARGV: id, member.
JOIN = _script("""
append('joined', ARGV[2])
redis.call('HSET', replicas, ARGV[1], cjson.encode({ARGV[2], ''}))
redis.call('HSET', heard, ARGV[1], string.format('%.6f', now()))
count_report()
return written(serial)
""")

# ARGV: id, member, report. Returns the member that is registered.
RENEW = _script("""
local found = redis.call('HGET', replicas, ARGV[1])
if not found then return false end
local known = cjson.decode(found)
if known[1] ~= ARGV[2] then return known[1] end
redis.call('HSET', heard, ARGV[1], string.format('%.6f', now()))
if known[2] ~= ARGV[3] then
  redis.call('HSET', replicas, ARGV[1], cjson.encode({ARGV[2], ARGV[3]}))
  count_report()
end
return known[1]
""")

# ARGV: id, incarnation or nothing.
LEAVE = _script("""
local found = redis.call('HGET', replicas, ARGV[1])
if not found then return 0 end
local member = cjson.decode(cjson.decode(found)[1])
if ARGV[2] ~= '' and member['incarnation'] ~= ARGV[2] then return 0 end
redis.call('HDEL', replicas, ARGV[1])
redis.call('HDEL', heard, ARGV[1])
append('left', ARGV[1])
count_report()
return 1
""")

STANDINGS = _script("""
return {string.format('%.6f', now()), redis.call('HGETALL', replicas), redis.call('HGETALL', heard)}
""")

# ARGV: the serial that a replica knows, the run in which it has agreed. Returns the server's run,
# and whether what the replica knows may be more.
WANTS = _script(
    """
local base = tonumber(redis.call('HGET', meta, 'base') or '0')
local goes_further = redis.call('HGET', meta, 'changed') ~= '1' and tonumber(ARGV[1]) > base
local is_wanted = ARGV[2] ~= run and (goes_further or tonumber(ARGV[1]) >= serial)
return {run, (agreed ~= run or is_wanted) and 1 or 0}
""",
    guarded=False,
)

# ARGV: the serial that a replica knows, the generation of names without a record, how many names,
# how many members, then name, record and the serial if it was unloaded in turn, then id and member
# in turn. Its content replaces the server's if it goes further, as long as no name was changed in
# this run. The new serial is above both. Returns the run.
RESTORE = _script(
    """
local known, generation = tonumber(ARGV[1]), tonumber(ARGV[2])
local num_names, num_members = tonumber(ARGV[3]), tonumber(ARGV[4])
if known >= MAX_SERIAL - 2 * LEAP then
  return redis.error_reply('ERR a server has been told of the serial ' .. ARGV[1] ..
    ', beyond which there are none: another program had written to it; start all servers anew')
end
if generation > first_generation then
  redis.call('HSET', meta, 'first_generation', written(generation))
end
if agreed ~= run then
  redis.call('HSET', meta, 'run', run, 'base', written(serial), 'changed', '0')
  append('restored', '', LEAP)
end
local base = tonumber(redis.call('HGET', meta, 'base'))
if redis.call('HGET', meta, 'changed') ~= '1' and known > base then
  redis.call('DEL', names, unloaded)
  for i = 0, num_names - 1 do
    local name, since = ARGV[5 + 3 * i], ARGV[7 + 3 * i]
    redis.call('HSET', names, name, ARGV[6 + 3 * i])
    if since ~= '' then redis.call('ZADD', unloaded, since, name) end
  end
  local first = 5 + 3 * num_names
  for i = 0, num_members - 1 do
    local id, member = ARGV[first + 2 * i], ARGV[first + 1 + 2 * i]
    if redis.call('HSETNX', replicas, id, cjson.encode({member, ''})) == 1 then
      redis.call('HSET', heard, id, string.format('%.6f', now()))
    end
  end
  redis.call('HSET', meta, 'base', written(known))
  append('restored', '', math.max(known - serial, 0) + LEAP)
  count_report()
elseif known >= serial then
  append('restored', '', known - serial + LEAP)
end
return run
""",
    guarded=False,
)
