// One recorded step: rows of ranks and hosts, bars for computation, buckets, reductions and wire.

import { ask, h, number, penOf, tip, toast, variable } from "./dom.js";

const ROW = 17;
const TOP = 20; // the scale of time
const COLOURS = {
  forward: "--compute", backward: "--c4", optimizer: "--c2", wait: "--exposed", reduced: "--hidden", submitted: "--ranks", ready: "--track",
  operation: "--hidden", ranks: "--ranks", host: "--exposed", queued: "--track", reduce: "--c3", encode: "--c6", decode: "--c6", copy: "--c5", send: "--c1", receive: "--c2",
};
const WHOLE = new Set(["step", "bucket", "operation"]); // spans around others: their background

export class Timeline {
  constructor(jobId) {
    this.canvas = h("canvas", { role: "img", "aria-label": "Timeline of one step", hidden: true });
    this.note = h("p", { class: "note" }, "Records the next steps of all ranks and hosts, and shows one: computation, buckets, reductions, wire.");
    this.legend = h("div", { class: "legend" });
    this.button = h("button", { type: "button", id: "record", onclick: () => this.record(jobId) }, "Record a step");
    this.body = h("div", { class: "scroll tall" }, this.canvas);
    this.element = h("section", { class: "card", id: "timeline" }, h("header", {}, h("h3", {}, "Timeline of one step"), h("span", { class: "right" }, this.button)), this.note, this.body, this.legend);
    this.hide = tip(this.canvas, (x, y) => this.words(x, y));
    this.seen = new ResizeObserver(() => this.draw());
    this.seen.observe(this.element);
  }

  async record(jobId) {
    this.button.disabled = true;
    this.button.textContent = "Recording …";
    try { this.show(await ask(`/api/jobs/${jobId}/trace`, {})); } catch (error) { toast(error.message); }
    this.button.disabled = false;
    this.button.textContent = "Record another";
  }

  show(document) {
    this.lanes = document.lanes;
    this.note.textContent = document.missing.join(" ");
    this.end = Math.max(0.001, ...this.lanes.flatMap(([, , spans]) => spans.map(([begin, length]) => begin + length)));
    const kinds = [...new Set(this.lanes.flatMap(([, , spans]) => spans.map((span) => span[2])))].filter((kind) => COLOURS[kind] && !WHOLE.has(kind));
    this.legend.replaceChildren(...kinds.map((kind) => {
      const mark = h("i");
      mark.style.background = `var(${COLOURS[kind]})`;
      return h("span", {}, mark, kind);
    }));
    this.canvas.hidden = false;
    this.draw();
  }

  draw() {
    if (!this.lanes || !this.element.clientWidth) return;
    const width = this.body.clientWidth;
    this.left = Math.min(190, width * 0.32);
    this.per = (width - this.left - 10) / this.end; // pixels of a millisecond
    const pen = penOf(this.canvas, width, this.lanes.length * ROW + TOP);
    this.lanes.forEach(([process, thread, spans], row) => {
      const y = TOP + row * ROW, begins = process !== this.lanes[row - 1]?.[0];
      if (begins) { pen.fillStyle = variable("--line"); pen.fillRect(0, y, width, 1); }
      pen.fillStyle = variable(begins ? "--ink" : "--faint");
      pen.fillText(begins ? `${process}: ${thread}` : `   ${thread}`, 0, y + ROW / 2, this.left - 8);
      for (const span of spans) this.drawSpan(pen, y, span);
    });
    this.drawScale(pen, width < 560 ? 2 : 4);
  }

  drawSpan(pen, y, [begin, length, kind]) {
    const around = WHOLE.has(kind) ? 2 : 3;
    pen.fillStyle = variable(WHOLE.has(kind) ? "--track" : COLOURS[kind] || "--faint");
    pen.fillRect(this.left + begin * this.per, y + around, Math.max(1, length * this.per), ROW - 2 * around);
  }

  drawScale(pen, parts) {
    pen.fillStyle = variable("--faint");
    for (let at = 0; at <= parts; at += 1) {
      pen.textAlign = at === parts ? "right" : at ? "center" : "left";
      pen.fillText(`${number(this.end * at / parts)} ms`, this.left + this.end * this.per * at / parts, 8);
    }
  }

  words(x, y) {
    const lane = this.lanes?.[Math.floor((y - TOP) / ROW)];
    if (!lane) return null;
    const at = (x - this.left) / this.per, near = 2 / this.per;
    const span = lane[2].filter(([begin, length]) => begin - near <= at && at <= begin + length + near).sort((a, b) => a[1] - b[1])[0];
    return span ? `${lane[0]}: ${lane[1]}\n${span[3] || span[2]}\n${number(span[1])} ms, from ${number(span[0])} ms` : null;
  }

  close() { this.seen.disconnect(); this.hide(); }
}
