// The cluster: figures, nodes and their slots, jobs that run and jobs that have ended.

import { ago, ask, fill, h, many, meter, number, penOf, pill, span, tip, toast, variable } from "./dom.js";
import { follow } from "./live.js";

const FEW = 36; // nodes that get a card each; more are squares
const CELL = 15, NARROW = 500, SMALL_CELL = 11; // pixels

export function showCluster(main, login) {
  document.title = "Bagua";
  const view = new ClusterView(login);
  main.replaceChildren(...view.cards());
  view.load("");
  follow("/api/stream", view.handlers(), () => view.fresh(), login);
  return () => view.close();
}

class ClusterView {
  constructor(login) {
    Object.assign(this, { login, known: new Map(), recent: [], next: "" });
    this.page = null; // jobs that were asked for; null: the newest, which come by themselves
    this.away = h("div", { class: "banner warn", role: "status", hidden: true });
    this.tiles = h("section", { class: "tiles", "aria-label": "Cluster" });
    this.nodes = h("div");
    this.nodeNote = h("span", { class: "note" });
    this.running = h("div", { class: "scroll tall" });
    this.others = h("p", { class: "note", hidden: true });
    this.ended = h("div");
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.load(this.next) }, "Older jobs");
    this.newest = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.load("") }, "Newest");
    this.filter = h("select", { "aria-label": "Which jobs", onchange: () => this.load("") },
      h("option", { value: "" }, "all ended"), ...["failed", "succeeded", "cancelled"].map((state) => h("option", { value: state }, state)));
    this.redraw = () => this.drawNodes();
    addEventListener("resize", this.redraw);
    addEventListener("bagua-theme", this.redraw);
  }

  cards() {
    return [
      this.away, this.tiles,
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Nodes"), this.nodeNote), this.nodes),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Jobs")), this.running, this.others),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Ended"), h("span", { class: "right" }, this.filter)), this.ended,
        h("div", { class: "buttons" }, this.newest, this.more))];
  }

  close() {
    removeEventListener("resize", this.redraw);
    removeEventListener("bagua-theme", this.redraw);
  }

  fresh() { this.known = new Map(); }

  handlers() {
    return {
      counts: (counts) => this.showCounts(counts),
      nodes: ({ changed, gone }) => {
        for (const row of changed) this.known.set(row[0], row);
        for (const name of gone) this.known.delete(name);
        this.drawNodes();
      },
      jobs: (jobs) => this.showJobs(jobs),
    };
  }

  showCounts(counts) {
    this.away.hidden = !counts.away;
    this.away.textContent = counts.away;
    this.nodeNote.textContent = counts.nodes - counts.connected ? `${counts.nodes - counts.connected} away` : "";
    fill(this.tiles, counts, () => [
      tile(`${counts.connected}`, counts.connected === counts.nodes ? "nodes" : `of ${counts.nodes} nodes`),
      tile(`${counts.used}\u00a0/\u00a0${counts.slots}`, "slots in use", counts.slots ? counts.used / counts.slots : 0),
      tile(counts.running, counts.running === 1 ? "job runs" : "jobs run"),
      tile(counts.pending, counts.pending === 1 ? "job waits for nodes" : "jobs wait for nodes"),
    ]);
  }

  showJobs({ running, more, recent }) {
    fill(this.running, [running, Math.floor(Date.now() / 10000)], () => jobTable(running, false));
    this.others.hidden = !more;
    this.others.textContent = `The newest ${running.length}. ${many(more, "other")}: bagua job list`;
    const anew = this.loaded && recent.length && recent[0].id !== this.recent[0]?.id;
    if (this.page === null && anew) this.load("");
  }

  // A page of jobs that have ended.
  async load(token) {
    try {
      const answer = await ask(`/api/jobs?state=${this.filter.value}&page=${encodeURIComponent(token)}`);
      this.page = token || this.filter.value ? answer.jobs : null;
      if (this.page === null) this.recent = answer.jobs;
      this.next = answer.next;
      this.loaded = true;
      this.more.hidden = !this.next;
      this.newest.hidden = this.page === null || (!token && this.filter.value !== "");
      const shown = this.page || this.recent;
      fill(this.ended, shown, () => jobTable(shown, true));
    } catch (error) {
      if (error.status === 401) this.login(); else toast(error.message);
    }
  }

  drawNodes() {
    const rows = [...this.known.values()].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
    const width = this.nodes.clientWidth;
    fill(this.nodes, [rows.map((row) => row.slice(0, 7)), rows.length > FEW && [width, variable("--accent")]], () => {
      if (!rows.length) return h("p", { class: "empty" }, "No node daemon has connected yet: bagua daemon");
      return rows.length <= FEW ? cards(rows) : squares(rows, width);
    });
  }
}

function tile(figure, words, share) {
  return h("div", { class: "card tile" }, h("b", {}, String(figure)), h("small", {}, words), share === undefined ? null : meter(share));
}

const nodeWords = ([id, host, address, slots, used, connected, draining, seen, version]) =>
  `${id}${host && host !== id ? ` on ${host}` : ""}\n${used} of ${many(slots, "slot")} in use${connected ? "" : `\naway, last seen ${ago(seen)}`}${draining ? "\ndraining" : ""}\n${address}, ${version}`;

function cards(rows) {
  return h("div", { class: "nodes" }, rows.map((row) => {
    const [id, , , slots, used, connected, draining] = row;
    const shown = Math.min(slots, 64);
    return h("div", { class: `node ${connected ? "" : "off"}`, title: nodeWords(row) },
      h("div", { class: "name" }, h("span", {}, id), connected ? draining ? pill("draining") : h("span", { class: "note" }, `${used}/${slots}`) : h("span", { class: "pill off" }, "away")),
      h("div", { class: "slots" }, Array.from({ length: shown }, (_, at) => h("i", { class: connected && at < used ? "used" : "" }))));
  }));
}

function squares(rows, width) {
  const cell = width < NARROW ? SMALL_CELL : CELL;
  const across = Math.max(1, Math.floor(width / cell));
  const canvas = h("canvas", { role: "img", "aria-label": `${rows.length} nodes` });
  const pen = penOf(canvas, across * cell, Math.ceil(rows.length / across) * cell);
  const [free, full, bad, warn] = ["--track", "--accent", "--bad", "--warn"].map(variable);
  rows.forEach((row, at) => {
    const [, , , slots, used, connected, draining] = row;
    const x = (at % across) * cell, y = Math.floor(at / across) * cell, side = cell - 3;
    pen.fillStyle = connected ? free : bad;
    pen.fillRect(x, y, side, side);
    if (connected && slots) {
      pen.fillStyle = draining ? warn : full;
      const high = Math.round(side * Math.min(1, used / slots));
      pen.fillRect(x, y + side - high, side, high);
    }
  });
  tip(canvas, (x, y) => {
    const row = rows[Math.floor(y / cell) * across + Math.floor(x / cell)];
    return row && nodeWords(row);
  });
  return [canvas, h("div", { class: "legend" }, legend("c-1", "slots in use"), h("span", {}, "red: away, amber: draining"))];
}

const legend = (kind, words) => h("span", {}, h("i", { class: kind }), words);

function jobTable(jobs, over) {
  if (!jobs.length) return h("p", { class: "empty" }, over ? "No job has ended yet." : "No job runs or waits. Submit one: bagua job submit train.py");
  return h("table", { class: "jobs" },
    h("thead", {}, h("tr", {}, ["Job", "State", over ? "Reason" : "Progress", "Nodes", "Ranks", over ? "Ended" : "Since"].map((words, at) => h("th", { class: at === 3 || at === 4 ? "num" : "" }, words)))),
    h("tbody", {}, jobs.map((job) => jobRow(job, over))));
}

function jobRow(job, over) {
  const path = `#/jobs/${job.id}`;
  const steps = job.step === null ? null : job.total ? `${number(job.step)} of ${number(job.total)}` : `step ${number(job.step)}`;
  const middle = over || (!steps && job.reason)
    ? h("td", { class: "wide reason" }, job.state === "succeeded" ? "" : job.reason)
    : h("td", { class: "wide progress" }, steps ? h("span", { class: "note" }, steps) : null, job.total ? meter(job.step / job.total) : null);
  return h("tr", { class: "link", onclick: (event) => { if (event.target.tagName !== "A") location.hash = path; } },
    h("td", {}, h("a", { href: path }, job.name || job.id), " ", h("span", { class: "note mono" }, job.name ? job.id.slice(0, 12) : "")),
    h("td", { class: "tight" }, pill(job.state)),
    middle,
    h("td", { class: "num drop" }, String(job.nodes)),
    h("td", { class: "num drop" }, String(job.ranks)),
    h("td", { class: "time drop" }, over ? `${ago(job.finished)} after ${span(job.finished - job.created)}` : ago(job.created)));
}
