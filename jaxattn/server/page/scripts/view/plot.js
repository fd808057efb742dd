// A plot of the last two minutes that moves as values come.

import { counted, element, svg } from "./element.js";

const SECONDS = 120;
const [WIDTH, HEIGHT, TOP] = [280, 64, 6];

export class LivePlot {
  /**
   * Args:
   *   place: that the plot goes to.
   *   title: above it.
   *   format: a value as text.
   */
  constructor(place, title, { format = counted } = {}) {
    Object.assign(this, { title, format });
    this.most = null; // the axis' end; null follows the values
    this.points = []; // [second, value]
    this.value = element("output", { class: "value", text: "–" });
    this.top = element("span", { class: "axis top", "aria-hidden": "true" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: nothing yet` },
      ...[0, 0.5, 1].map((part) => {
        const y = TOP + (HEIGHT - TOP - 1) * part;
        return svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
      }),
      this.area, this.line, this.cursor,
    );
    place.append(element(
      "figure",
      { class: "plot" },
      element("figcaption", {}, element("span", { text: title }), this.value),
      element("div", { class: "frame" }, this.drawing, this.top),
      element("div", { class: "axis", "aria-hidden": "true" }, element("span", { text: "2 min ago" }), element("span", { text: "now" })),
    ));
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
  }

  add(second, value) {
    if (this.points.length && second < this.points.at(-1)[0]) this.points = []; // the server began anew
    this.points.push([second, value]);
    while (this.points[0][0] < second - SECONDS) this.points.shift();
    this.draw();
  }

  draw() {
    const [now, value] = this.points.at(-1);
    const values = this.points.map(([, each]) => each);
    const most = this.most ?? rounded(Math.max(1, ...values));
    this.scale = { now, most };
    const path = this.points.map(([second, each]) => `${this.x(second).toFixed(1)} ${this.y(each).toFixed(1)}`).join("L");
    this.line.setAttribute("d", `M${path}`);
    this.area.setAttribute("d", `M${this.x(this.points[0][0]).toFixed(1)} ${HEIGHT}L${path}L${WIDTH} ${HEIGHT}Z`);
    this.top.textContent = this.format(most);
    if (!this.pointed) this.value.value = this.format(value);
    this.drawing.setAttribute(
      "aria-label",
      `${this.title}: ${this.format(value)} now, at most ${this.format(Math.max(...values))} in the last two minutes`,
    );
  }

  x(second) {
    return WIDTH * (1 - (this.scale.now - second) / SECONDS);
  }

  y(value) {
    return HEIGHT - 1 - (HEIGHT - TOP - 1) * Math.min(1, value / this.scale.most);
  }

  /** Shows the value under the pointer, or the latest one. */
  point(event) {
    this.pointed = event !== null && this.points.length > 0;
    this.cursor.setAttribute("visibility", this.pointed ? "visible" : "hidden");
    if (!this.points.length) return;
    let found = this.points.at(-1);
    if (this.pointed) {
      const box = this.drawing.getBoundingClientRect();
      const second = this.scale.now - SECONDS * (1 - (event.clientX - box.left) / box.width);
      found = this.points.reduce((best, each) => (Math.abs(each[0] - second) < Math.abs(best[0] - second) ? each : best));
      const x = this.x(found[0]);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }
    const age = Math.round(this.scale.now - found[0]);
    this.value.value = this.format(found[1]) + (this.pointed && age ? `, ${age} s ago` : "");
  }
}

/** The next number of the form 1, 2 or 5 times a power of ten. */
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}
