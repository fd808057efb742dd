// Applies the chosen theme before the first paint; a classic script, since modules run later.
"use strict";
try {
  const theme = localStorage.getItem("jaxattn.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that stores nothing shows the system's theme.
}
