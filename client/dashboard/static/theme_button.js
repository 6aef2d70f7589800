// The button that chooses between light, dark and the system's theme. theme.js applies the choice when the page loads.

const THEMES = ["system", "light", "dark"];
const SIGNS = { system: "◐", light: "☀", dark: "☾" };
const chosen = document.documentElement.dataset;
const button = document.getElementById("theme");
const theme = () => chosen.theme || "system";
const tellOthers = () => dispatchEvent(new Event("bagua-theme"));

function label() {
  button.textContent = SIGNS[theme()];
  button.setAttribute("aria-label", `Theme: ${theme()}`);
}

button.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") delete chosen.theme;
  else chosen.theme = next;
  try { localStorage.setItem("bagua-theme", next); } catch { /* storage is off */ }
  label();
  tellOthers();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellOthers);
label();
