// A line chart that moves: axes with units, and what stood where, by pointer or arrow keys.

import { el, say, svg } from "./dom.js";
import { SHOWN_SECONDS } from "./history.js";

const HEIGHT = 170;
const LEFT = 52; // room for the figures of the axis
const [TOP, RIGHT, BOTTOM] = [10, 12, 24];
const NUM_TICKS = 4;

export class Chart {
  /**
   * @param {Object} options
   * @param {string} options.title
   * @param {string} options.help  what is counted, in a sentence.
   * @param {{name: string, key: string}[]} options.lines  at most two; key: of a point's value.
   * @param {function(number): string} options.format  a value with its unit.
   * @param {number} [options.least]  what the axis reaches at least.
   * @param {number} [options.most]  where the axis ends, whatever the values.
   */
  constructor(options) {
    this.options = options;
    this.points = [];
    this.cursor = null; // a place in points
    this.width = 0;
    this.plot = svg("svg", { class: "plot", height: HEIGHT, "aria-hidden": "true" });
    this.tooltip = el("div", { class: "tooltip", hidden: true });
    this.spoken = el("p", { class: "visually-hidden", "aria-live": "polite" });
    this.figures = options.lines.map(() => el("strong", {}, "–"));
    this.frame = el(
      "div",
      {
        class: "frame",
        tabindex: "0",
        role: "group",
        "aria-label": `${options.title}: arrow keys read earlier values`,
        onpointermove: (event) => this.#pointAt(event.offsetX),
        onpointerleave: () => this.#moveTo(null),
        onblur: () => this.#moveTo(null),
        onkeydown: (event) => this.#keyed(event),
      },
      this.plot,
      this.tooltip,
    );
    const legend = options.lines.map((line, index) =>
      el("li", {}, swatch(index), `${line.name} `, this.figures[index]),
    );
    this.element = el(
      "section",
      { class: "card chart" },
      el("h3", {}, options.title),
      el("p", { class: "help" }, options.help),
      el("ul", { class: "legend" }, ...legend),
      this.frame,
      this.spoken,
    );
    new ResizeObserver(([entry]) => this.#resized(entry.contentRect.width)).observe(this.frame);
  }

  /** @param {Object[]} points  oldest first, with `time` in seconds and the lines' keys. */
  show(points) {
    this.points = points;
    if (this.cursor !== null && this.cursor >= points.length) this.cursor = null;
    const last = points[points.length - 1];
    this.options.lines.forEach((line, index) =>
      say(this.figures[index], this.options.format(last?.[line.key])),
    );
    this.#draw();
  }

  #resized(width) {
    this.width = Math.floor(width);
    this.#draw();
  }

  #x(time) {
    const now = this.points[this.points.length - 1].time;
    return LEFT + (this.width - LEFT - RIGHT) * (1 + (time - now) / SHOWN_SECONDS);
  }

  #draw() {
    if (this.width <= LEFT + RIGHT) return;
    const ticks = niceTicks(this.#highest(), NUM_TICKS, this.options.most);
    const top = ticks[ticks.length - 1];
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const parts = [...this.#horizontals(ticks, y), ...this.#minutes()];
    if (this.points.length) {
      this.options.lines.forEach((line, index) => {
        const d = path(this.points, line.key, (time) => this.#x(time), y);
        parts.push(svg("path", { class: `line line-${index}`, d }));
      });
      parts.push(...this.#marks(y));
    } else {
      const [x, middle] = [(LEFT + this.width) / 2, HEIGHT / 2];
      parts.push(svg("text", { x, y: middle, class: "middle" }, "Waiting for figures …"));
    }
    this.plot.setAttribute("width", this.width);
    this.plot.replaceChildren(...parts);
  }

  #highest() {
    const values = this.points.flatMap((point) =>
      this.options.lines.map((line) => point[line.key] ?? 0),
    );
    return Math.max(this.options.least ?? 0, ...values);
  }

  #horizontals(ticks, y) {
    return ticks.flatMap((tick) => [
      svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "end", x: LEFT - 6, y: y(tick) + 4 }, this.options.format(tick)),
    ]);
  }

  #minutes() {
    const step = (this.width - LEFT - RIGHT) / (SHOWN_SECONDS / 60);
    const every = step < 48 ? 2 : 1;
    const labels = [];
    for (let minutes = 0; minutes < SHOWN_SECONDS / 60; minutes += every) {
      const x = this.width - RIGHT - minutes * step;
      const text = minutes ? `−${minutes} min` : "now";
      labels.push(svg("text", { class: minutes ? "middle" : "end", x, y: HEIGHT - 6 }, text));
    }
    return labels;
  }

  /** The cursor and its tooltip. */
  #marks(y) {
    const point = this.cursor === null ? null : this.points[this.cursor];
    this.tooltip.hidden = point === null;
    if (point === null) return [];
    const x = this.#x(point.time);
    const ago = Math.round(this.points[this.points.length - 1].time - point.time);
    const told = this.options.lines.map(
      (line) => `${line.name} ${this.options.format(point[line.key])}`,
    );
    const texts = [ago ? `${ago} s ago` : "now", ...told];
    this.tooltip.replaceChildren(...texts.map((text) => el("div", {}, text)));
    this.tooltip.style.left = `${Math.min(x + 10, this.width - this.tooltip.offsetWidth - 4)}px`;
    const dots = this.options.lines.flatMap((line, index) => {
      const value = point[line.key];
      const known = value !== null && value !== undefined;
      return known ? [svg("circle", { class: `dot dot-${index}`, cx: x, cy: y(value), r: 4 })] : [];
    });
    return [svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots];
  }

  #pointAt(x) {
    if (!this.points.length) return;
    const distances = this.points.map((point) => Math.abs(this.#x(point.time) - x));
    this.#moveTo(distances.indexOf(Math.min(...distances)));
  }

  #keyed(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15 };
    if (!(event.key in steps) || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.#moveTo(Math.min(last, Math.max(0, (this.cursor ?? last) + steps[event.key])));
    say(this.spoken, [...this.tooltip.children].map((line) => line.textContent).join(", "));
  }

  #moveTo(cursor) {
    this.cursor = cursor;
    this.#draw();
    if (cursor === null) this.tooltip.hidden = true;
  }
}

/** The line as it is drawn: whole or dashed, so that no colour has to be told from another. */
function swatch(index) {
  return svg(
    "svg",
    { class: "swatch", width: 22, height: 8, "aria-hidden": "true" },
    svg("path", { class: `line line-${index}`, d: "M1 4H21" }),
  );
}

/** SVG's path of a line, with a gap where a value is missing. */
export function path(points, key, x, y) {
  let d = "";
  let isDrawing = false;
  for (const point of points) {
    const value = point[key];
    const isKnown = value !== null && value !== undefined;
    if (isKnown) d += `${isDrawing ? "L" : "M"}${x(point.time).toFixed(1)} ${y(value).toFixed(1)}`;
    isDrawing = isKnown;
  }
  return d;
}

/**
 * Round figures from 0 to at least `highest`; to `most` where the axis ends there.
 * @returns {number[]}
 */
export function niceTicks(highest, count, most) {
  const end = most ?? (highest > 0 ? highest : 1);
  const rough = end / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let index = 0; index * step < end + step * 0.999; index += 1) {
    ticks.push(Number((index * step).toPrecision(6)));
  }
  return most === undefined ? ticks : ticks.filter((tick) => tick <= most * 1.001);
}
