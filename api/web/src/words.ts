// Figures as people read them, in the same words as the command line.

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(value: number): string {
  return integers.format(value);
}

export function compact(value: number): string {
  return Math.abs(value) < 10_000 ? integers.format(value) : short.format(value);
}

/** `16 ms`, `1.25 s`, `3 min 05 s`. */
export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(2)} s` : duration(value);
}

/** `48 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`. */
export function duration(totalSeconds: number): string {
  const spent = Math.max(0, Math.round(totalSeconds));
  const days = Math.floor(spent / 86400);
  const hours = Math.floor(spent / 3600) % 24;
  const minutes = Math.floor(spent / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(spent % 60).padStart(2, "0")} s` : `${spent} s`;
}

export function age(instant: string): string {
  return duration((Date.now() - Date.parse(instant)) / 1000).split(" ").slice(0, 2).join(" ");
}

export function clock(instant: string): string {
  return new Date(instant).toLocaleTimeString("en-GB");
}

export function when(instant: string): string {
  const at = new Date(instant);
  return `${at.toLocaleDateString("sv-SE")} ${at.toLocaleTimeString("en-GB")}`;
}

export function fixed(value: number | null | undefined, digits: number): string {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function percent(share: number | null | undefined, digits = 1): string {
  return share === null || share === undefined ? "–" : `${(share * 100).toFixed(digits)} %`;
}

/** `41.2 %`, and of a small share its first digits: `0.0012 %`. */
export function share(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value >= 0.001 || value === 0) return percent(value);
  return value < 0.00001 ? "< 0.001 %" : `${(value * 100).toPrecision(2)} %`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${size < 10 && unit > 0 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** `rank lost` of rank_lost. */
export function plain(word: string): string {
  return word.replaceAll("_", " ");
}

/** `0–3, 7` of 0 1 2 3 7. */
export function runs(ids: readonly number[]): string {
  const found: [number, number][] = [];
  for (const id of ids) {
    const last = found.at(-1);
    if (last && id === last[1] + 1) last[1] = id;
    else found.push([id, id]);
  }
  return found.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`)).join(", ");
}

export function plural(number: number, noun: string, many = `${noun}s`): string {
  return `${count(number)} ${number === 1 ? noun : many}`;
}
