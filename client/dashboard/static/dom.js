// Elements, requests and words. Everything that comes from the cluster becomes text, never markup.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const pill = (state) => h("span", { class: `pill ${state}` }, state);

export function meter(share) {
  const bar = h("i");
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("div", { class: "meter" }, bar);
}

// Puts children in place only if something has changed, so that selections and scroll positions stay.
export function fill(element, key, make) {
  const text = JSON.stringify(key);
  if (element.bagua === text) return;
  element.bagua = text;
  element.replaceChildren(...[make()].flat().filter((child) => child !== null));
}

export class Refused extends Error {
  constructor(status, words) { super(words); this.status = status; }
}

// The proof that this origin keeps beside the cookie, which goes to all ports of the host: both together are a session.
export const proof = () => localStorage.getItem("bagua-proof") || "";

export async function ask(path, body) {
  const options = { headers: { "x-bagua-dashboard": "1", "x-bagua-proof": proof() } };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  let answer;
  try { answer = await fetch(path, options); } catch { throw new Refused(0, "The dashboard does not answer."); }
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, document.error || `The dashboard answered ${answer.status}.`);
  if (document.proof) localStorage.setItem("bagua-proof", document.proof);
  return document;
}

export function toast(words) {
  const place = document.getElementById("toast");
  place.textContent = words;
  place.hidden = false;
  clearTimeout(place.timer);
  place.timer = setTimeout(() => { place.hidden = true; }, 6000);
}

// Resolves to true if the user confirms.
export function confirm(title, words, yes, danger = false) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    const close = (answer) => { dialog.close(); resolve(answer); };
    dialog.replaceChildren(
      h("h2", {}, title),
      h("p", {}, words),
      h("div", { class: "buttons" },
        h("button", { type: "button", onclick: () => close(false) }, "Back"),
        h("button", { type: "button", class: danger ? "main danger" : "main", id: "confirm", onclick: () => close(true) }, yes)));
    dialog.oncancel = () => resolve(false);
    dialog.showModal();
  });
}

export function tip(element, wordsAt) {
  let shown = null;
  const hide = () => { shown?.remove(); shown = null; };
  element.addEventListener("pointermove", (event) => {
    const words = wordsAt(event.offsetX, event.offsetY);
    if (!words) { hide(); return; }
    shown ??= document.body.appendChild(h("div", { class: "tip" }));
    shown.textContent = words;
    const left = Math.min(event.clientX + 14, innerWidth - shown.offsetWidth - 8);
    shown.style.left = `${Math.max(4, left)}px`;
    shown.style.top = `${event.clientY + 16 + shown.offsetHeight > innerHeight ? event.clientY - shown.offsetHeight - 10 : event.clientY + 16}px`;
  });
  element.addEventListener("pointerleave", hide);
  return hide;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" });
export const atTime = (seconds) => clock.format(seconds * 1000);
export const atDate = (seconds) => full.format(seconds * 1000);

export function ago(seconds) {
  const past = Date.now() / 1000 - seconds;
  return past < 5 ? "just now" : `${span(past)} ago`;
}

export function span(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

// The 2D context of a canvas that gets this size, in the pixels of a style sheet.
export function penOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
