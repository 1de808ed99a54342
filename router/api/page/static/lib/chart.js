// Lines over time, by uPlot, in the colours of the style sheet.

import { h } from "./dom.js";
import { clock } from "./format.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The top of an axis and the distance of its marks: two to four marks, the last one above all data. Without data there is
// the mark of 0 alone.
export function scaleOf(high, least) {
  if (!(high > 0)) return { top: 1, marks: [0] };
  const power = 10 ** Math.floor(Math.log10(high / 3));
  const step = Math.max(least, power * [1, 2, 5, 10].find((each) => each * power >= high / 3));
  const count = Math.ceil(high / step - 1e-9);
  return { top: count * step, marks: Array.from({ length: count + 1 }, (_, at) => at * step) };
}

// `lines` are [{name, colour, format, fill}]; update(columns) takes times and a column for each line.
export class Chart {
  constructor(lines, format, { least = 0, height = 150 } = {}) {
    this.lines = lines;
    this.format = format;
    this.least = least;
    this.height = height;
    this.place = h("div", { class: "chart" });
    this.columns = [[], ...lines.map(() => [])];
    this.watch = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height }));
    this.watch.observe(this.place);
  }

  update(columns) {
    this.columns = columns;
    if (this.plot) this.plot.setData(columns);
    else if (this.place.clientWidth) this.draw();
  }

  draw() {
    this.plot?.destroy();
    const muted = colour("--muted");
    const axis = { stroke: muted, font: `11px ${colour("--font")}`, ticks: { show: false } };
    const format = (_, values) => values.map((each) => (each === null ? "" : this.format(each)));
    this.plot = new uPlot(
      {
        width: this.place.clientWidth,
        height: this.height,
        padding: [8, 26, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 6 } },
        scales: { y: { range: (_, low, high) => [0, scaleOf(high, this.least).top] } },
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 90, values: (_, times) => this.times(times) },
          { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 54, gap: 8, splits: () => this.marks(), values: format },
        ],
        series: [
          {},
          ...this.lines.map((each) => ({
            label: each.name,
            stroke: colour(each.colour),
            fill: each.fill ? colour(each.fill) : undefined,
            width: 1.75,
            points: { show: false },
            spanGaps: false,
          })),
        ],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)] },
      },
      this.columns,
      this.place,
    );
  }

  marks() {
    const values = this.columns.slice(1).flat().filter((each) => each !== null);
    return scaleOf(values.reduce((most, each) => Math.max(most, each), 0), this.least).marks;
  }

  // Shows the figures under the pointer, and the last ones without a pointer.
  read(index) {
    if (!this.figures) return;
    this.lines.forEach((_, line) => {
      const column = this.columns[line + 1];
      const value = column[index ?? column.length - 1];
      this.figures[line].textContent = value === null || value === undefined ? "–" : this.format(value);
    });
  }

  // A legend whose figures follow the pointer.
  legend() {
    this.figures = this.lines.map(() => h("b", {}, "–"));
    return h("ul", { class: "legend" }, this.lines.map((each, line) => h("li", {}, h("i", { class: `swatch ${each.mark}` }), each.name, this.figures[line])));
  }

  // Minutes, and seconds where two marks have one minute.
  times(times) {
    const shown = times.map((at) => clock(at).slice(0, 5));
    return new Set(shown).size === shown.length ? shown : times.map((at) => clock(at));
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
  }
}
