// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const NOTHING = "–";

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export const whole = (value) => (known(value) ? WHOLE.format(value) : NOTHING);

/** At most four digits: 0.3, 12.5, 340, 12.5K. */
export function figure(value) {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) >= 10000) return COMPACT.format(value);
  return Math.abs(value) >= 100 ? WHOLE.format(value) : SHORT.format(value);
}

/** A share from 0 to 1. */
export const percent = (value) => (known(value) ? `${SHORT.format(value * 100)} %` : NOTHING);

export function seconds(value) {
  if (!known(value)) return NOTHING;
  if (value < 1) return `${value < 0.01 ? SHORT.format(value * 1000) : WHOLE.format(value * 1000)} ms`;
  return `${value < 100 ? SHORT.format(value) : WHOLE.format(value)} s`;
}

export function duration(value) {
  if (!known(value)) return NOTHING;
  if (value < 60) return `${SHORT.format(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${place ? SHORT.format(value) : WHOLE.format(value)} ${units[place]}`;
}

/** When something was, on this machine's clock; since is in seconds since 1970. */
export const moment = (since) => new Date(since * 1000).toLocaleString("en-GB");

/** How versions are shown in rows: the head of the digest and the generation. */
export function version(digest, generation) {
  if (!digest) return NOTHING;
  return generation === undefined ? digest.slice(0, 12) : `${digest.slice(0, 12)}-g${generation}`;
}
