// Line and area charts by uPlot, with titles and legends of our own.

import { h, number, variable } from "./dom.js";

const HEIGHT = 170;
const hourMinute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const withSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

const POWERS = Array.from({ length: 45 }, (_, at) => 2 ** at);

function axes(format, binary) {
  const shared = {
    stroke: () => variable("--faint"), font: "11px system-ui, sans-serif",
    grid: { stroke: () => variable("--line"), width: 1 }, ticks: { show: false },
  };
  const times = (_, values) => {
    const close = values.length > 1 && values[1] - values[0] < 60;
    return values.map((value) => (close ? withSeconds : hourMinute).format(value * 1000));
  };
  return [{ ...shared, space: 76, values: times, size: 28 }, { ...shared, size: 68, ...(binary ? { incrs: POWERS } : {}), values: (_, values) => values.map((value) => format(value)) }];
}

// series: [{name, label, colour (a variable), area}]. stacked: each series lies on those before it.
export class Chart {
  constructor(title, series, { stacked = false, binary = false, format = number, zero = false } = {}) {
    this.series = series;
    this.stacked = stacked;
    this.binary = binary; // marks at powers of two
    this.format = format;
    this.zero = zero || stacked;
    this.last = h("b");
    this.plot = h("div", { class: "plot" });
    this.legend = h("div", { class: "legend", hidden: series.length < 2 });
    this.values = new Map();
    for (const one of series) {
      const value = h("span");
      this.values.set(one.name, value);
      this.legend.append(h("span", {}, h("i", { class: one.mark }), one.label, " ", value));
    }
    this.element = h("section", { class: "card chart" }, h("header", {}, h("h3", {}, title), h("span", { class: "right" }, this.last)), this.plot, this.legend);
    this.seen = new ResizeObserver(() => this.fit());
    this.seen.observe(this.plot);
  }

  // document: {t, series: {name: [...]}}
  show(document) {
    this.document = document;
    const columns = this.series.map((one) => document.series[one.name] || document.t.map(() => null));
    columns.forEach((column, at) => {
      const newest = column.findLast((value) => value !== null);
      this.values.get(this.series[at].name).textContent = newest === undefined ? "" : this.format(newest);
      if (this.series.length === 1) this.last.textContent = newest === undefined ? "" : this.format(newest);
    });
    let data = columns;
    if (this.stacked) {
      const sums = document.t.map(() => 0);
      data = columns.map((column) => column.map((value, at) => { sums[at] += value ?? 0; return value === null ? null : sums[at]; }));
      data.reverse(); // the tallest is drawn first, those below it over it
      this.last.textContent = sums.length ? this.format(sums[sums.length - 1]) : "";
    }
    this.data = [document.t, ...data];
    if (this.made) this.made.setData(this.data);
    else this.make();
  }

  make() {
    const width = this.plot.clientWidth;
    if (!width || !this.data) return;
    const order = this.stacked ? [...this.series].reverse() : this.series;
    this.made = new uPlot({
      width, height: HEIGHT, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: axes(this.format, this.binary),
      series: [{}, ...order.map((one) => ({
        stroke: () => variable(one.colour), width: this.stacked ? 1 : 1.8, spanGaps: true, points: { show: false },
        fill: this.stacked ? () => variable(one.colour) : one.area ? () => `${variable(one.colour)}22` : undefined,
      }))],
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx)] },
    }, this.data, this.plot);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.zero) return [0, high > 0 ? high * 1.08 : 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  point(at) {
    if (!this.document) return;
    const any = at !== null && at !== undefined;
    for (const one of this.series) {
      const column = this.document.series[one.name];
      const value = column && (any ? column[at] : column.findLast((found) => found !== null));
      const words = value === null || value === undefined ? "" : this.format(value);
      this.values.get(one.name).textContent = words;
      if (this.series.length === 1) this.last.textContent = any ? `${words}  ${withSeconds.format(this.document.t[at] * 1000)}` : words;
    }
  }

  fit() {
    if (this.made) this.made.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    else this.make();
  }

  redraw() { this.made?.redraw(false); }

  close() { this.seen.disconnect(); this.made?.destroy(); }
}
