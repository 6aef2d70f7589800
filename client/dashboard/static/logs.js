// The output of ranks, as it comes. Follows the end unless the reader has scrolled up.

import { h } from "./dom.js";

const KEPT = 2000;

export class Logs {
  // onRanks(text): another choice of ranks
  constructor(onRanks) {
    this.box = h("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Output of ranks" });
    this.choice = h("select", { "aria-label": "Ranks", onchange: () => { this.clear(); onRanks(this.choice.value); } }, h("option", { value: "" }, "all ranks"));
    this.note = h("span", { class: "note" });
    this.element = h("section", { class: "card", id: "logs" }, h("header", {}, h("h3", {}, "Output"), this.note, h("span", { class: "right" }, this.choice)), this.box);
    this.several = true;
  }

  ranks(numbers) {
    this.several = numbers.length > 1;
    const text = numbers.join();
    if (this.known === text) return;
    this.known = text;
    const chosen = this.choice.value;
    this.choice.replaceChildren(h("option", { value: "" }, "all ranks"), ...numbers.slice(0, 256).map((rank) => h("option", { value: String(rank) }, `rank ${rank}`)));
    this.choice.value = chosen;
  }

  clear() { this.box.replaceChildren(); this.note.textContent = ""; }

  add({ lines, skipped }) {
    const follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    const made = lines.map(([rank, text]) => h("div", {}, this.several ? h("span", { class: "rank" }, String(rank)) : null, plain(text)));
    if (skipped) made.unshift(h("div", { class: "gap" }, `… ${skipped} lines came too fast to be shown …`));
    this.box.append(...made);
    while (this.box.childElementCount > KEPT) this.box.firstElementChild.remove();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  end(words) { this.note.textContent = words === "end" ? (this.box.childElementCount ? "complete" : "nothing was printed") : words; }
}

// Without the sequences that colour a terminal.
const plain = (text) => text.replace(/\u001b\[[0-9;:?]*[A-Za-z]/g, "").replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, "�");
