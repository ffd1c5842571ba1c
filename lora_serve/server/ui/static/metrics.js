// The arithmetic of Prometheus' text format: what was counted, between which moments.

/**
 * Read a page of metrics.
 * @returns {Map<string, {labels: Object<string, string>, value: number}[]>} samples by name.
 */
export function parseMetrics(text) {
  const byName = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const sample = parseLine(line);
    if (!byName.has(sample.name)) byName.set(sample.name, []);
    byName.get(sample.name).push(sample);
  }
  return byName;
}

function parseLine(line) {
  const open = line.indexOf("{");
  if (open < 0) {
    const [name, value] = line.split(" ");
    return { name, labels: {}, value: numberOf(value) };
  }
  const labels = {};
  let place = open + 1;
  while (line[place] !== "}") {
    const equals = line.indexOf("=", place);
    const [value, end] = quoted(line, equals + 2);
    labels[line.slice(place, equals)] = value;
    place = line[end] === "," ? end + 1 : end;
  }
  return { name: line.slice(0, open), labels, value: numberOf(line.slice(place + 1).trim()) };
}

/** A quoted text that begins at `start`, and the place behind its last quotation mark. */
function quoted(line, start) {
  let value = "";
  let place = start;
  while (place < line.length && line[place] !== '"') {
    if (line[place] === "\\") {
      place += 1;
      value += line[place] === "n" ? "\n" : line[place];
    } else {
      value += line[place];
    }
    place += 1;
  }
  return [value, place + 1];
}

function numberOf(text) {
  const value = text.split(" ")[0]; // a time may follow
  return value === "+Inf" ? Infinity : value === "-Inf" ? -Infinity : Number(value);
}

/** All samples of a name, added up; 0 if there are none. */
export function total(metrics, name) {
  return (metrics.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);
}

/** A counter by one label's values. @returns {Object<string, number>} */
export function totalsBy(metrics, name, label) {
  const totals = {};
  for (const { labels, value } of metrics.get(name) ?? []) {
    totals[labels[label]] = (totals[labels[label]] ?? 0) + value;
  }
  return totals;
}

/** A histogram's cumulative counts, by upper bound, smallest first. @returns {[number, number][]} */
export function buckets(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = numberOf(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort(([one], [other]) => one - other);
}

/** What a counter grew by. One that is smaller than before has begun anew. */
export const increase = (before, after) => (after < before ? after : after - before);

/** A counter's growth per second. */
export const rate = (before, after, seconds) =>
  seconds > 0 ? increase(before, after) / seconds : null;

/**
 * The q-quantile of what a histogram counted between two moments, as Prometheus' histogram_quantile
 * estimates it: evenly spread within a bucket; the last finite bound where it lies above all bounds.
 * @param {[number, number][]} before  as `buckets` gives them; [] for since the beginning.
 * @returns {?number} null if nothing was counted.
 */
export function quantile(q, before, after) {
  const earlier = new Map(before);
  const hasBegunAnew = after.some(([bound, count]) => count < (earlier.get(bound) ?? 0));
  const counts = after.map(([bound, count]) => [
    bound,
    hasBegunAnew ? count : count - (earlier.get(bound) ?? 0),
  ]);
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!all) return null;
  const rank = q * all;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= rank && count > below) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}
