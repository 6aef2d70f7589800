// One job: state, charts, ranks, membership, events, output, and what may be done with it.

import { atDate, atTime, bytes, ask, confirm, fill, h, many, meter, number, pill, span, toast } from "./dom.js";
import { Chart } from "./charts.js";
import { HeatMap } from "./heat.js";
import { Timeline } from "./timeline.js";
import { Logs } from "./logs.js";
import { follow } from "./live.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const CHANGES = ["placed", "regrouped", "suspended", "joining", "joined", "left", "grown", "scaled", "paused", "resumed"];
const perSecond = (value) => `${bytes(value)}/s`;
const ms = (value) => `${number(value)} ms`;
const nameOf = (rank, size) => size ? `rank ${rank} of island ${Math.floor(rank / size)}` : `rank ${rank}`;

export function showJob(main, id, login) {
  document.title = "Job · Bagua";
  const view = new JobView(main, id);
  const path = (ranks) => `/api/stream?job=${encodeURIComponent(id)}&logs=${ranks}`;
  const start = (ranks) => follow(path(ranks), view.handlers(), () => view.fresh(), login);
  view.logs = new Logs(start);
  view.layout();
  start("");
  return () => view.close();
}

class JobView {
  constructor(main, id) {
    Object.assign(this, { main, id, charts: new Map(), events: [], data: null });
    this.head = h("section", { class: "card" });
    this.away = h("div", { class: "banner warn", hidden: true });
    this.trouble = h("div");
    this.late = h("div", { class: "banner warn", id: "straggler", hidden: true });
    this.grid = h("div", { class: "charts" });
    this.empty = h("p", { class: "card empty" }, "No figures yet. They come when the job trains, and when its script calls bagua.report(step, total, {\"loss\": …}).");
    this.heat = new HeatMap();
    this.heat.element.hidden = true;
    this.timeline = new Timeline(id);
    this.timeline.element.hidden = true;
    this.members = h("section", { class: "card", id: "members", hidden: true });
    this.ranks = h("section", { class: "card" });
    this.history = h("section", { class: "card" });
    this.spec = h("section", { class: "card" });
    this.theme = () => { for (const chart of this.charts.values()) chart.redraw(); this.heat.draw(); this.timeline.draw(); };
    addEventListener("bagua-theme", this.theme);
  }

  layout() {
    this.main.replaceChildren(this.away, this.head, this.trouble, this.late, this.empty, this.grid, this.heat.element, this.timeline.element,
      this.members, this.logs.element, this.ranks, this.history, this.spec);
  }

  close() {
    removeEventListener("bagua-theme", this.theme);
    for (const chart of this.charts.values()) chart.close();
    this.heat.close();
    this.timeline.close();
  }

  fresh() { this.events = []; this.logs.clear(); }

  handlers() {
    return {
      job: (job) => this.job(job),
      events: (events) => { this.events.push(...events); this.showEvents(); },
      now: (now) => this.now(now),
      chart: (points) => this.points(points),
      heat: (map) => { this.heat.element.hidden = map.rows.length < 2; this.heat.show(map, (rank) => nameOf(rank, this.known?.island_size)); },
      away: (words) => { this.away.hidden = !words; this.away.textContent = words; },
      log: (news) => this.logs.add(news),
      log_end: (words) => this.logs.end(words),
    };
  }

  // ---- head

  job(job) {
    this.known = job;
    const over = ENDED.includes(job.state);
    document.title = `${job.name || job.job_id} · Bagua`;
    this.showHead(job, over);
    this.showTrouble(job, over);
    if (over) this.late.hidden = true;
    this.showRanks(job);
    this.timeline.element.hidden = over ? !this.timeline.lanes : job.state !== "running";
    this.timeline.button.hidden = over;
    this.logs.ranks([...new Set([...job.ranks, ...job.gone, ...job.joining].map((rank) => rank.member))].sort((a, b) => a - b));
    this.showSpecification(job);
  }

  showHead(job, over) {
    fill(this.head, [job, this.step], () => [
      h("div", { class: "head" }, h("h1", {}, job.name || job.job_id), pill(job.state),
        h("div", { class: "actions" },
          over ? null : h("button", { type: "button", class: "danger", id: "cancel", onclick: () => this.cancel() }, "Cancel"),
          h("button", { type: "button", id: "again", disabled: Boolean(job.no_again), title: job.no_again || null, onclick: () => this.again() }, "Submit again"))),
      h("p", { class: "facts" },
        h("span", { class: "mono" }, job.job_id),
        h("span", {}, h("b", {}, many(job.nnodes, "node")), ` × ${many(job.nproc_per_node, "rank")}${job.island_size ? ` in islands of ${job.island_size}` : ""}`),
        h("span", {}, over ? "took " : "since ", h("b", {}, over ? job.took : atTime(job.started_at || job.created_at))),
        h("span", {}, "submitted ", h("b", {}, atDate(job.created_at))),
        job.elastic ? h("span", {}, "elastic, generation ", h("b", {}, String(job.generation))) : null,
        job.paused ? pill("paused") : null),
      this.progress()]);
  }

  showSpecification(job) {
    fill(this.spec, [job.entry, job.args, job.env, job.workdir, job.tuning, job.growth], () => [
      h("header", {}, h("h3", {}, "Specification")),
      h("pre", {}, [job.entry, ...job.args].join(" ")),
      h("p", { class: "note" }, `in ${job.workdir || "/"}`),
      job.tuning ? h("p", {}, job.tuning) : null,
      job.growth ? h("p", {}, job.growth) : null,
      Object.keys(job.env).length ? h("pre", {}, Object.entries(job.env).map(([name, value]) => `${name}=${value}`).join("\n")) : null]);
  }

  progress() {
    const now = this.step;
    if (!now || now.step === null) return null;
    const left = now.total && now.speed ? (now.total - now.step) / now.speed : null;
    const words = [now.total ? `step ${now.step} of ${now.total}` : `step ${now.step}`];
    if (left > 1 && !ENDED.includes(this.known?.state)) words.push(`${span(left)} left`);
    if (now.message) words.push(now.message);
    return h("div", {}, h("p", { class: "facts" }, words.join(" · ")), now.total ? meter(now.step / now.total) : null);
  }

  showTrouble(job, over) {
    const failed = job.last_lines;
    const words = job.state === "failed" || job.state === "cancelled" ? job.reason : over ? "" : job.waiting || (job.state === "pending" || job.state === "waiting" ? job.reason : "");
    fill(this.trouble, [words, failed, job.state], () => !words ? [] :
      h("div", { class: `banner ${job.state === "failed" ? "bad" : "warn"}` }, h("div", {}, words,
        failed && job.state === "failed" ? h("details", {}, h("summary", {}, `Last lines of ${nameOf(failed.rank, job.island_size)}`), h("pre", {}, failed.text)) : null)));
  }

  // ---- figures

  now(now) {
    this.step = now;
    if (this.known) this.job(this.known);
    const late = now.straggler, over = ENDED.includes(this.known?.state);
    this.late.hidden = !late || over;
    if (late) this.late.textContent = `R${nameOf(late.rank, this.known?.island_size).slice(1)}${late.node ? ` on ${late.node}` : ""} computes ${ms(late.ms)} a step, the others ${ms(late.median)}: all wait for it.`;
  }

  points(news) {
    if (news.whole || !this.data) this.data = { t: [], series: {} };
    const { data } = this;
    const before = data.t.length;
    data.t.push(...news.t);
    for (const name of Object.keys(news.series)) data.series[name] ??= Array(before).fill(null);
    for (const [name, column] of Object.entries(data.series)) column.push(...(news.series[name] || news.t.map(() => null)));
    this.empty.hidden = data.t.length > 0;
    this.makeCharts();
    for (const chart of this.charts.values()) chart.show(data);
  }

  makeCharts() {
    const has = (name) => name in this.data.series;
    const add = (key, make) => {
      if (this.charts.has(key)) return;
      const chart = make();
      this.charts.set(key, chart);
      this.grid.append(chart.element);
    };
    const reported = Object.keys(this.data.series).filter((name) => name.startsWith("m:"));
    reported.sort((a, b) => Number(b.includes("loss")) - Number(a.includes("loss")));
    reported.forEach((name, at) =>
      add(name, () => new Chart(name.slice(2), [{ name, label: name.slice(2), colour: `--c${at % 6 + 1}`, area: true }])));
    if (has("speed")) add("speed", () => new Chart("steps per second", [{ name: "speed", label: "steps/s", colour: "--c2", area: true }], { zero: true }));
    if (has("compute")) {
      add("parts", () => new Chart("where a step goes", [
        { name: "compute", label: "computation alone", colour: "--compute", mark: "c-compute" },
        { name: "hidden", label: "with hidden communication", colour: "--hidden", mark: "c-hidden" },
        { name: "ranks", label: "waits for ranks of its host", colour: "--ranks", mark: "c-ranks" },
        { name: "exposed", label: "exposed communication", colour: "--exposed", mark: "c-exposed" },
      ], { stacked: true, format: ms }));
    }
    if (has("inside")) {
      add("bytes", () => new Chart("bytes moved", [
        { name: "inside", label: "inside hosts", colour: "--c2", mark: "c-2" },
        { name: "between", label: "between hosts", colour: "--c1", mark: "c-1", area: true },
      ], { format: perSecond, zero: true, binary: true }));
    }
  }

  // ---- tables

  showRanks(job) {
    const rows = [...job.ranks, ...job.joining.map((rank) => ({ ...rank, joins: true })), ...job.gone];
    const island = (rank) => job.island_size ? h("td", {}, "island" in rank ? String(rank.island) : "") : null;
    fill(this.ranks, [rows, job.rank_count], () => [
      h("header", {}, h("h3", {}, "Ranks"), job.rank_count > job.ranks.length ? h("span", { class: "note" }, `${job.ranks.length} of ${job.rank_count} are listed`) : null),
      rows.length ? h("div", { class: "scroll" }, h("table", { class: "ranks" },
        h("thead", {}, h("tr", {}, h("th", {}, "Rank"), job.island_size ? h("th", {}, "Island") : null, h("th", {}, "Node"), h("th", {}, "State"), h("th", { class: "num drop" }, "Process"), h("th", {}, "Exit"))),
        h("tbody", {}, rows.map((rank) => h("tr", {},
          h("td", {}, rank.last_generation ? `member ${rank.member}` : rank.joins ? "joins" : String(rank.rank)),
          island(rank),
          h("td", {}, rank.node_id),
          h("td", {}, pill(rank.last_generation ? "gone" : rank.state)),
          h("td", { class: "num drop" }, rank.pid ? String(rank.pid) : ""),
          h("td", { class: "tight" }, rank.signal ? `signal ${rank.signal}` : rank.exit_code === null ? "" : String(rank.exit_code))))))) : h("p", { class: "empty" }, "Not placed yet.")]);
  }

  showEvents() {
    const events = this.events.slice(-500);
    fill(this.history, events.map((event) => event.seq), () => [h("header", {}, h("h3", {}, "Events")), table(events.toReversed())]);
    const changes = events.filter((event) => CHANGES.includes(event.kind));
    const several = new Set(changes.map((event) => event.generation)).size > 1;
    this.members.hidden = !several && !this.known?.elastic;
    fill(this.members, changes.map((event) => event.seq), () => [h("header", {}, h("h3", {}, "Membership"), h("span", { class: "note" }, "generations of the job")), generations(changes)]);
  }

  // ---- what may be done

  async cancel() {
    const { name } = this.known;
    if (!await confirm("Cancel this job?", `${name || this.id} and its ${many(this.known.rank_count || 1, "rank")} are stopped. Work since the last checkpoint is lost.`, "Cancel the job", true)) return;
    try { await ask(`/api/jobs/${this.id}/cancel`, {}); toast("The job is being stopped."); } catch (error) { toast(error.message); }
  }

  async again() {
    const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const job = this.known;
    if (!await confirm("Submit this job again?", `A new job with the same specification: ${job.name || job.entry}, ${many(job.nnodes, "node")} × ${many(job.nproc_per_node, "rank")}.`, "Submit")) return;
    try {
      const made = await ask(`/api/jobs/${this.id}/again`, { key });
      location.hash = `#/jobs/${made.id}`;
    } catch (error) { toast(error.message); }
  }
}

function table(events) {
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, events.map((event) => h("tr", {},
    h("td", { class: "time", title: atDate(event.time) }, atTime(event.time)), h("td", { class: "tight" }, event.kind.replaceAll("_", " ")), h("td", {}, event.reason))))));
}

// The newest first: from when to when each generation was, and why it began.
function generations(changes) {
  const found = [];
  for (const event of changes) {
    const last = found[found.length - 1];
    if (last && last.generation === event.generation) last.reasons.push(event);
    else found.push({ generation: event.generation, time: event.time, reasons: [event] });
  }
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, found.map((one, at) => h("tr", {},
    h("td", { class: "tight" }, h("b", {}, String(one.generation))),
    h("td", { class: "time" }, atTime(one.time)),
    h("td", { class: "time" }, at + 1 < found.length ? `for ${span(found[at + 1].time - one.time)}` : "now"),
    h("td", {}, one.reasons.map((event) => h("div", {}, event.reason))))).reverse())));
}
