// The figures and the sorted table of page.html, from the JSON in the page.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const config = { displayModeBar: false, responsive: true };

/** The value of a style variable, such as --ink. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A copy in which names of style variables, where colors stand, have become colors. */
function themed(value, key = "") {
  if (Array.isArray(value)) return value.map((item) => themed(item, key));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
  }
  const named = /colors?$/.test(key) && typeof value === "string" && value.startsWith("--");
  return named ? color(value) : value;
}

/**
 * As many names below the axis as there is room for: in forward, and mirrored in backward.
 *
 * @param forward The place and the name of each layer.
 * @param end The place where the step ends.
 * @param width Of the axis, in pixels.
 */
function ticks(forward, end, width) {
  const longest = Math.max(...forward.map((tick) => tick[1].length));
  const apart = ((6.5 * longest + 8) * end) / width;
  let last = -Infinity;
  const there = forward.filter(([place]) => {
    const fits = place - last >= apart && (end - 2 * place >= apart || forward.length === 1);
    if (fits) last = place;
    return fits;
  });
  const back = forward.length === 1 ? [] : there.map(([place, name]) => [end - place, name]);
  const shown = [...there, ...back];
  return { tickvals: shown.map((tick) => tick[0]), ticktext: shown.map((tick) => tick[1]) };
}

function draw(id) {
  const place = document.getElementById(id);
  const { data, layout } = themed(figures[id]);
  Object.assign(layout, {
    dragmode: false,
    font: { color: color("--ink"), family: "system-ui, sans-serif", size: 13 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: {
      align: "left",
      bgcolor: color("--panel"),
      bordercolor: color("--line"),
      font: { color: color("--ink") },
    },
  });
  if (figures[id].ticks) {
    const room = place.clientWidth - layout.margin.l - layout.margin.r;
    const names = ticks(figures[id].ticks, layout.xaxis.range[1], room);
    Object.assign(layout.xaxis, names, { fixedrange: true });
    Object.assign(layout.yaxis, { gridcolor: color("--line"), fixedrange: true });
  }
  Plotly.react(place, data, layout, config);
}

function drawAll() {
  Object.keys(figures).forEach(draw);
}

function sortable(table) {
  const titles = [...table.querySelectorAll("th")];
  titles.forEach((title, column) => {
    title.querySelector("button").addEventListener("click", () => {
      const numbers = title.classList.contains("number");
      const before = title.getAttribute("aria-sort");
      // Numbers begin with the largest, words with the first.
      const first = numbers ? "descending" : "ascending";
      const other = numbers ? "ascending" : "descending";
      const order = before === first ? other : first;
      titles.forEach((one) => one.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value;
      const compare = numbers
        ? (a, b) => value(a) - value(b)
        : (a, b) => value(a).localeCompare(value(b), undefined, { numeric: true });
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
    });
  });
}

drawAll();
sortable(document.getElementById("slots"));
dark.addEventListener("change", drawAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) {
    width = window.innerWidth;
    draw("step");
  }
});
