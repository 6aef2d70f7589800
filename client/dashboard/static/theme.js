// Before anything is drawn: the theme that was chosen here earlier.
"use strict";
{
  let chosen = null;
  try { chosen = localStorage.getItem("bagua-theme"); } catch { /* storage is off: as the system */ }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
