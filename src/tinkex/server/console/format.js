// Formats numbers, sizes and times for people. Pure.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

export const count = (n) => minus(grouped.format(n));
export const short = (n) =>
  Math.abs(n) < 10000
    ? count(n)
    : minus(
        compact
          .format(n)
          .replace("K", " k")
          .replace(/([MBT])$/, " $1"),
      );

/** A measured value with about four digits; very small and very large values with a power of ten. */
export function value(x, digits = 4) {
  if (x === null || x === undefined || !Number.isFinite(x)) return NONE;
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e6) return count(x);
  if (size < 1e-3 || size >= 1e6)
    return minus(
      x
        .toExponential(Math.min(2, digits - 1))
        .replace(/\.?0+e/, "e")
        .replace("e+", "e"),
    );
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return minus(x.toFixed(Math.min(decimals, digits)));
}

/** A value with up to six digits, without trailing zeros. */
export function measure(x) {
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-3 || size >= 1e9)
    ? value(x)
    : minus(new Intl.NumberFormat("en", { maximumSignificantDigits: 6 }).format(x));
}

/** A learning rate, in its shortest form. */
export function rate(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return NONE;
  if (x === 0) return "0";
  const text = Number(x.toPrecision(3));
  return Math.abs(x) < 1e-2 ? text.toExponential().replace("e+", "e").replace("-", "−") : String(text);
}

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = n;
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = size >= 9.95 ? 3 : 2;
  return `${unit === 0 || size >= 99.5 ? Math.round(size) : Number(size.toPrecision(digits))} ${units[unit]}`;
}

export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  if (s < 3570) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** "3 min ago", "in 2 days". */
export function when(time, now = Date.now()) {
  const seconds = (new Date(time).getTime() - now) / 1000;
  const size = Math.abs(seconds);
  if (size < 5) return "now";
  const [n, unit] =
    size < 60
      ? [size, "s"]
      : size < 3600
        ? [size / 60, "min"]
        : size < 86400
          ? [size / 3600, "h"]
          : [size / 86400, "d"];
  const text = `${Math.max(1, Math.floor(n))} ${unit}`;
  return seconds < 0 ? `${text} ago` : `in ${text}`;
}

export function exactly(time) {
  return new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function minus(text) {
  return text.replace(/^-/, "−").replace("e-", "e−");
}

/** The name of a run, or its id if it has none. */
export function runName(run) {
  const given = run.name || (run.user_metadata?.name ?? run.user_metadata?.run_name);
  return given ? given.slice(0, 120) : shortId(run.training_run_id);
}

/** Shortens an id: ids differ in their first characters; after the first colon comes the run within the session. */
export function shortId(id) {
  const [session, ...rest] = id.split(":");
  return [session.length > 14 ? `${session.slice(0, 8)}…` : session, ...rest].join(":");
}
