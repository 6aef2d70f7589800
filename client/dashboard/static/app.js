// Which view is shown: login, the cluster, a job.

import { ask, h, toast } from "./dom.js";
import { leave } from "./live.js";
import { showCluster } from "./cluster.js";
import { showJob } from "./job.js";
import "./theme_button.js";

const main = document.getElementById("main");

let end = () => {};

async function route() {
  end();
  leave();
  end = () => {};
  const [, kind, id] = location.hash.match(/^#\/(jobs)\/([\w-]+)$/) || [];
  main.replaceChildren();
  scrollTo(0, 0);
  if (location.hash.startsWith("#code=")) { await withCode(location.hash.slice(6)); return; }
  try {
    const hello = await ask("/api/hello");
    document.getElementById("where").textContent = hello.coordinator;
    document.getElementById("logout").hidden = false;
  } catch (error) {
    if (error.status === 401) login();
    else main.replaceChildren(h("div", { class: "card" }, error.message));
    return;
  }
  end = (kind ? showJob(main, id, login) : showCluster(main, login)) || (() => {});
}

async function withCode(code) {
  history.replaceState(null, "", "#/");
  try { await ask("/api/login", { code }); } catch { /* used before: the token is asked for, if needed */ }
  route();
}

function login(words = "") {
  end();
  leave();
  end = () => {};
  document.getElementById("logout").hidden = true;
  document.title = "Bagua";
  const field = h("input", { type: "password", name: "token", autocomplete: "current-password", placeholder: "token", required: true, "aria-label": "Token" });
  const error = h("p", { class: "error", role: "alert", hidden: !words }, words);
  const form = h("form", { class: "card login", onsubmit: async (event) => {
    event.preventDefault();
    try {
      await ask("/api/login", { token: field.value });
      route();
    } catch (refused) {
      error.textContent = refused.message;
      error.hidden = false;
      field.select();
    }
  } },
    h("h1", {}, "Log in"),
    h("p", { class: "note" }, "The token of the cluster lies in the coordinator's state folder: ~/.local/state/bagua/token."),
    field, error,
    h("button", { class: "main", type: "submit" }, "Log in"));
  main.replaceChildren(form);
  field.focus();
}

document.getElementById("logout").addEventListener("click", async () => {
  try { await ask("/api/logout", {}); } catch (error) { toast(error.message); }
  login();
});
addEventListener("hashchange", route);
route();
