// The stream of this tab: open while the tab is seen, so hidden and closed tabs cost nothing.

import { ask, proof } from "./dom.js";

let source = null;
let wanted = null;
let retry = 0;
const lamp = document.getElementById("live");

function light(kind, words) {
  lamp.className = `live ${kind}`;
  lamp.textContent = words;
}

function open() {
  close();
  if (wanted === null || document.hidden) return;
  const { path, handlers, lost } = wanted;
  source = new EventSource(`${path}${path.includes("?") ? "&" : "?"}proof=${proof()}`);
  source.onopen = () => light("on", "live");
  source.onerror = async () => {
    if (source?.readyState !== EventSource.CLOSED && source !== null) { light("off", "connecting …"); return; }
    close();
    light("off", "connecting …");
    try { await ask("/api/hello"); } catch (error) { if (error.status === 401) { lost(); return; } }
    retry = setTimeout(open, 3000);
  };
  for (const [kind, handler] of Object.entries(handlers)) {
    source.addEventListener(kind, (event) => handler(JSON.parse(event.data)));
  }
  wanted.fresh();
}

function close() {
  clearTimeout(retry);
  source?.close();
  source = null;
}

// handlers by kind of event; fresh() is called before each opening: everything comes again; lost(): nobody is logged in.
export function follow(path, handlers, fresh, lost) {
  wanted = { path, handlers, fresh, lost };
  open();
}

export function leave() {
  wanted = null;
  close();
  light("", "");
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { close(); light("", "paused"); } else open();
});
addEventListener("pagehide", close);
