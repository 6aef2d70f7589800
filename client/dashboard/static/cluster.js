// The cluster: figures, nodes and their slots, jobs that run and jobs that have ended.

import { ago, ask, fill, h, many, meter, number, pill, span, tip, toast, variable } from "./dom.js";
import { follow } from "./live.js";

const FEW = 36; // nodes that get a card each; more are squares
const CELL = 15, NARROW = 500, SMALL_CELL = 11; // pixels

export function showCluster(main, login) {
  document.title = "Bagua";
  const tiles = h("section", { class: "tiles", "aria-label": "Cluster" });
  const away = h("div", { class: "banner warn", role: "status", hidden: true });
  const nodes = h("div");
  const nodeNote = h("span", { class: "note" });
  const running = h("div", { class: "scroll tall" });
  const others = h("p", { class: "note", hidden: true });
  const ended = h("div");
  const more = h("button", { type: "button", hidden: true }, "Older jobs");
  const newest = h("button", { type: "button", class: "quiet", hidden: true }, "Newest");
  const filter = h("select", { "aria-label": "Which jobs" },
    ...[["", "all ended"], ["failed", "failed"], ["succeeded", "succeeded"], ["cancelled", "cancelled"]].map(([value, words]) => h("option", { value }, words)));
  main.replaceChildren(
    away, tiles,
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Nodes"), nodeNote), nodes),
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Jobs")), running, others),
    h("section", { class: "card" }, h("header", {}, h("h2", {}, "Ended"), h("span", { class: "right" }, filter)), ended,
      h("div", { class: "buttons" }, newest, more)));

  let known = new Map();
  let recent = [];
  let page = null; // a page that was asked for; null: the newest, which come by themselves
  let next = "";
  const drawEnded = () => fill(ended, page || recent, () => jobTable(page || recent, true));

  async function load(token) {
    try {
      const answer = await ask(`/api/jobs?state=${filter.value}&page=${encodeURIComponent(token)}`);
      page = token || filter.value ? answer.jobs : null;
      if (page === null) recent = answer.jobs;
      next = answer.next;
      more.hidden = !next;
      newest.hidden = page === null || (!token && filter.value !== "");
      drawEnded();
    } catch (error) {
      if (error.status === 401) login(); else toast(error.message);
    }
  }
  more.addEventListener("click", () => load(next));
  newest.addEventListener("click", () => load(""));
  filter.addEventListener("change", () => load(""));
  load("");

  const drawNodes = () => {
    const rows = [...known.values()].sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
    fill(nodes, [rows.map((row) => row.slice(0, 7)), rows.length > FEW && [nodes.clientWidth, variable("--accent")]],
      () => rows.length === 0 ? h("p", { class: "empty" }, "No node daemon has connected yet: bagua daemon") : rows.length <= FEW ? cards(rows) : squares(rows, nodes.clientWidth));
  };
  addEventListener("resize", drawNodes);
  addEventListener("bagua-theme", drawNodes);

  follow("/api/stream", {
    counts: (document) => {
      away.hidden = !document.away;
      away.textContent = document.away;
      nodeNote.textContent = document.nodes - document.connected ? `${document.nodes - document.connected} away` : "";
      fill(tiles, document, () => [
        tile(`${document.connected}`, document.connected === document.nodes ? "nodes" : `of ${document.nodes} nodes`),
        tile(`${document.used}\u00a0/\u00a0${document.slots}`, "slots in use", document.slots ? document.used / document.slots : 0),
        tile(document.running, document.running === 1 ? "job runs" : "jobs run"),
        tile(document.pending, document.pending === 1 ? "job waits for nodes" : "jobs wait for nodes"),
      ]);
    },
    nodes: ({ changed, gone }) => {
      for (const row of changed) known.set(row[0], row);
      for (const name of gone) known.delete(name);
      drawNodes();
    },
    jobs: (document) => {
      fill(running, [document.running, Math.floor(Date.now() / 10000)], () => jobTable(document.running, false));
      others.hidden = !document.more;
      others.textContent = `The newest ${document.running.length}. ${many(document.more, "other")}: bagua job list`;
      const anew = document.recent.length && document.recent[0].id !== recent[0]?.id;
      if (page === null && anew && recent.length) load("");
    },
  }, () => { known = new Map(); }, login);
  return () => { removeEventListener("resize", drawNodes); removeEventListener("bagua-theme", drawNodes); };
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
  const scale = devicePixelRatio || 1;
  const height = Math.ceil(rows.length / across) * cell;
  canvas.width = across * cell * scale; canvas.height = height * scale;
  canvas.style.width = `${across * cell}px`; canvas.style.height = `${height}px`;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  const [free, full, bad, warn] = ["--track", "--accent", "--bad", "--warn"].map(variable);
  rows.forEach((row, at) => {
    const [, , , slots, used, connected, draining] = row;
    const x = (at % across) * cell, y = Math.floor(at / across) * cell, side = cell - 3;
    draw.fillStyle = connected ? free : bad;
    draw.fillRect(x, y, side, side);
    if (connected && slots) {
      draw.fillStyle = draining ? warn : full;
      const high = Math.round(side * Math.min(1, used / slots));
      draw.fillRect(x, y + side - high, side, high);
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
