// Numbers in words, as the commands of Quire write them.

const whole = new Intl.NumberFormat("en");

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(Math.round(value)));

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    const scaled = value / size;
    if (Math.abs(scaled) >= 9.95) return `${scaled.toFixed(0)} ${unit}`;
    if (Math.abs(scaled) >= 0.95 || unit === "µs") return `${scaled.toFixed(1)} ${unit}`;
  }
  return "";
}

export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.01) return "< 1 %";
  return `${share < 1 ? Math.min(99, Math.round(100 * share)) : count(Math.round(100 * share))} %`;
}

export function rate(value) {
  return value === null || value === undefined ? "–" : value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function clock(at, fine) {
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return fine ? `${time}.${String(date.getMilliseconds()).padStart(3, "0")}` : time;
}

export const words = (name) => name.replaceAll("_", " ");
export const title = (text) => text[0].toUpperCase() + text.slice(1);

export function figure(value) {
  if (Number.isInteger(value)) return count(value);
  return Math.abs(value) >= 100 ? count(value) : value.toPrecision(3);
}
