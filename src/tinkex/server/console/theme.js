// Light, dark, or the system's theme. A plain script in the head, so that the page never flashes in the wrong theme.
(() => {
  const NAME = "tinkex-theme";
  const themes = ["auto", "light", "dark"];

  function kept() {
    try {
      const theme = localStorage.getItem(NAME);
      return themes.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // a browser that keeps nothing for us
    }
  }

  function show(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${theme}`;
    }
  }

  let theme = kept();
  show(theme);
  document.addEventListener("DOMContentLoaded", () => {
    show(theme);
    document.getElementById("theme").addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // Without storage the choice lasts until the page is left.
      }
      show(theme);
    });
  });
})();
