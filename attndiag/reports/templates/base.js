(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  if (button) {
    const dark = () => root.dataset.theme === "dark" ||
      (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    const name = () => { button.textContent = dark() ? "light" : "dark"; button.setAttribute("aria-label", `switch to ${dark() ? "light" : "dark"} colours`); };
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); root.dispatchEvent(new Event("themechange")); });
    name();
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const press = head.querySelector("button");
      if (!press) return;
      press.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[column], given = cell.dataset.v ?? cell.textContent.trim();
          const plain = given.replace("\u2212", "-").replace(/[\u00a0%,]/g, "");
          return plain !== "" && Number.isFinite(Number(plain)) ? Number(plain) : given;
        };
        const body = table.tBodies[0], rows = [...body.rows];
        rows.sort((a, b) => {
          const x = value(a), y = value(b);
          // what has no number goes last whichever way the rest is sorted
          if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
          return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
        });
        body.append(...rows);
      });
    });
  }
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); });
})();
