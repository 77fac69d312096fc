// A line graph of the last two minutes.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 60;
/** Milliseconds that a graph shows. */
export const WINDOW = 120_000;

/** A graph in a figure that has an ``output``, an ``svg`` and an element of class ``top``. */
export class Graph {
  /**
   * @param {HTMLElement} figure
   * @param {string} title for screen readers
   * @param {(value: number) => string} format of a value
   * @param {number | null} top value at the top; null for the highest value shown
   */
  constructor(figure, title, format, top = null) {
    this.title = title;
    this.format = format;
    this.top = top;
    this.svg = figure.querySelector("svg");
    this.latest = figure.querySelector("output");
    this.scale = figure.querySelector(".top");
    this.area = this.#path("area");
    this.line = this.#path("line");
  }

  /**
   * Draw the values; a null is a gap.
   * @param {{time: number, value: ?number}[]} points in the order of time
   * @param {number} now time at the right edge
   */
  draw(points, now) {
    const values = points.map((p) => p.value).filter((value) => value !== null);
    const top = this.top ?? Math.max(1, ...values);
    const x = (time) => (WIDTH * (1 - (now - time) / WINDOW)).toFixed(2);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * (value / top)).toFixed(2);
    let line = "";
    let area = "";
    for (const run of runs(points)) {
      const path = run.map((p) => `${x(p.time)} ${y(p.value)}`).join("L");
      line += `M${path}h.01`; // a single point is seen too
      area += `M${x(run[0].time)} ${HEIGHT}L${path}V${HEIGHT}Z`;
    }
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    const latest = points.at(-1)?.value ?? null;
    this.latest.textContent = latest === null ? "-" : this.format(latest);
    this.scale.textContent = `top: ${this.format(top)}`;
    this.svg.setAttribute("aria-label", `${this.title}, now ${this.latest.textContent}`);
  }

  #path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.svg.append(path);
    return path;
  }
}

/** The runs of points without a gap. */
function runs(points) {
  const found = [];
  let open = null;
  for (const point of points) {
    if (point.value === null) open = null;
    else if (open) open.push(point);
    else found.push((open = [point]));
  }
  return found;
}
