// One recorded step: rows of ranks and hosts, bars for computation, buckets, reductions and wire.

import { ask, h, number, tip, toast, variable } from "./dom.js";

const ROW = 17;
const TOP = 20; // the scale of time
const COLOURS = {
  forward: "--compute", backward: "--c4", optimizer: "--c2", wait: "--exposed", reduced: "--hidden", submitted: "--ranks", ready: "--track",
  operation: "--hidden", ranks: "--ranks", host: "--exposed", queued: "--track", reduce: "--c3", encode: "--c6", decode: "--c6", copy: "--c5", send: "--c1", receive: "--c2",
};
const WHOLE = new Set(["step", "bucket", "operation"]); // spans around others: an outline alone

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
    const width = this.body.clientWidth, left = this.left = Math.min(190, width * 0.32);
    const scale = devicePixelRatio || 1, height = this.lanes.length * ROW + TOP;
    this.canvas.width = width * scale; this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`; this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.per = (width - left - 10) / this.end;
    let before = "";
    this.lanes.forEach(([process, thread, spans], row) => {
      const y = TOP + row * ROW;
      if (process !== before) { pen.fillStyle = variable("--line"); pen.fillRect(0, y, width, 1); }
      pen.fillStyle = variable(process !== before ? "--ink" : "--faint");
      pen.fillText(process === before ? `   ${thread}` : `${process}: ${thread}`, 0, y + ROW / 2, left - 8);
      before = process;
      for (const [begin, length, kind] of spans) {
        const x = left + begin * this.per, long = Math.max(1, length * this.per);
        if (WHOLE.has(kind)) { pen.fillStyle = variable("--track"); pen.fillRect(x, y + 2, long, ROW - 4); continue; }
        pen.fillStyle = variable(COLOURS[kind] || "--faint");
        pen.fillRect(x, y + 3, long, ROW - 6);
      }
    });
    pen.fillStyle = variable("--faint");
    const parts = width < 560 ? 2 : 4;
    for (let at = 0; at <= parts; at += 1) {
      pen.textAlign = at === parts ? "right" : at ? "center" : "left";
      pen.fillText(`${number(this.end * at / parts)} ms`, left + this.end * this.per * at / parts, 8);
    }
    pen.textAlign = "left";
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
