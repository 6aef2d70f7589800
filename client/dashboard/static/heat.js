// A map of ranks over time: how long each computes in a step, beside the median of all. A straggler is a red line.

import { atTime, h, number, penOf, tip, variable } from "./dom.js";

const LEFT = 46;
const BOTTOM = 20;

export class HeatMap {
  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Computation of each rank over time" });
    this.note = h("span", { class: "note" });
    this.body = h("div", {}, this.canvas);
    this.element = h("section", { class: "card", id: "heat" },
      h("header", {}, h("h3", {}, "Computation of each rank, ms per step"), this.note),
      this.body,
      h("div", { class: "legend" }, h("span", {}, "as the median", h("i", { class: "scale" }), "twice as long, or more")));
    this.hide = tip(this.canvas, (x, y) => this.words(x, y));
    this.seen = new ResizeObserver(() => this.draw());
    this.seen.observe(this.body);
  }

  // `name`: what a rank is called.
  show(document, name) {
    this.document = document;
    this.name = name;
    this.medians = (document.rows[0] || []).map((_, column) => {
      const found = document.rows.map((row) => row[column]).filter((value) => value !== null).sort((a, b) => a - b);
      return found.length ? found[(found.length - 1) >> 1] : null;
    });
    const each = document.ranks_in_row;
    this.note.textContent = each > 1 ? `each line: the slowest of ${each} ranks` : "";
    this.draw();
  }

  draw() {
    const width = this.body.clientWidth;
    if (!this.document || !width) return;
    const { rows } = this.document;
    this.high = Math.max(3, Math.min(22, Math.floor(320 / rows.length)));
    this.wide = Math.min(40, (width - LEFT) / Math.max(this.medians.length, 1));
    const height = rows.length * this.high + BOTTOM;
    const pen = penOf(this.canvas, width, height);
    this.drawCells(pen);
    pen.fillStyle = variable("--faint");
    this.drawRanks(pen);
    this.drawTimes(pen, height - BOTTOM / 2 + 2);
  }

  drawCells(pen) {
    const { wide, high } = this;
    const colours = [0, 1, 2, 3].map((at) => rgb(variable(`--heat-${at}`)));
    const gap = high > 6 ? 1 : 0;
    this.document.rows.forEach((row, at) => row.forEach((value, column) => {
      if (value === null) return;
      pen.fillStyle = colour(colours, value / (this.medians[column] || value || 1));
      pen.fillRect(LEFT + column * wide, at * high, Math.ceil(wide) - (wide > 5 ? 1 : 0), high - gap);
    }));
  }

  drawRanks(pen) {
    const every = Math.ceil(13 / this.high);
    pen.textAlign = "right";
    this.document.rows.forEach((_, at) => {
      if (at % every === 0) pen.fillText(`${at * this.document.ranks_in_row}`, LEFT - 8, at * this.high + this.high / 2);
    });
  }

  drawTimes(pen, y) {
    const { begin, width: seconds } = this.document;
    const long = this.medians.length * this.wide;
    pen.textAlign = "left";
    pen.fillText(atTime(begin), LEFT, y);
    if (long < 200) return;
    pen.textAlign = "right";
    pen.fillText(atTime(begin + this.medians.length * seconds), LEFT + long, y);
  }

  words(x, y) {
    if (!this.document || !this.wide) return null;
    const { rows, begin, width, ranks_in_row: each, nodes } = this.document;
    const row = Math.floor(y / this.high), column = Math.floor((x - LEFT) / this.wide);
    const value = rows[row]?.[column];
    if (value === undefined || value === null) return null;
    const name = each > 1 ? `ranks ${row * each}–${row * each + each - 1}` : `${this.name(row)}${nodes[row] ? ` on ${nodes[row]}` : ""}`;
    return `${name}\n${number(value)} ms, median ${number(this.medians[column])} ms\n${atTime(begin + column * width)}`;
  }

  close() { this.seen.disconnect(); this.hide(); }
}

function rgb(text) {
  const found = parseInt(text.slice(1), 16);
  return [found >> 16, (found >> 8) & 255, found & 255];
}

// 1: as the median; 2 and more: the last colour.
function colour(colours, ratio) {
  const at = Math.max(0, Math.min(2.999, ratio <= 1 ? Math.max(0, ratio) * 0.9 : 0.9 + (ratio - 1) * 2.1));
  const low = Math.floor(at), part = at - low;
  const mixed = colours[low].map((value, channel) => Math.round(value + (colours[low + 1][channel] - value) * part));
  return `rgb(${mixed.join(" ")})`;
}
