// The overview: tiles and charts of /metrics, or what may be said without it.

import { ApiError, askJson, askText } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, say } from "./dom.js";
import { duration, figure, percent, seconds, whole } from "./format.js";
import { History, sampleOf } from "./history.js";
import { parseMetrics } from "./metrics.js";
import { session } from "./session.js";
import { tiersOf, tiersTable } from "./tiers.js";

const CHARTS = [
  {
    title: "Tokens per second",
    help: "Prompt tokens computed (not those found in a cache), and tokens generated.",
    lines: [
      { name: "generated", key: "generated" },
      { name: "prompt", key: "prompt" },
    ],
    format: (value) => figure(value),
    least: 10,
  },
  {
    title: "Requests",
    help: "Those that have a part in the steps, and those that wait.",
    lines: [
      { name: "running", key: "running" },
      { name: "waiting", key: "waiting" },
    ],
    format: whole,
    least: 4,
  },
  {
    title: "Time to first token",
    help: "Of requests that ended within 30 s: half, and 95 of 100, were as fast or faster.",
    lines: [
      { name: "p50", key: "firstTokenP50" },
      { name: "p95", key: "firstTokenP95" },
    ],
    format: seconds,
    least: 0.04,
  },
  {
    title: "Time between tokens",
    help: "Of tokens that were generated within 30 s.",
    lines: [
      { name: "p50", key: "interTokenP50" },
      { name: "p95", key: "interTokenP95" },
    ],
    format: seconds,
    least: 0.04,
  },
  {
    title: "KV cache in use",
    help: "Share of the device's blocks that requests hold.",
    lines: [{ name: "in use", key: "kvUsage" }],
    format: percent,
    most: 1,
  },
  {
    title: "Prefix hits",
    help: "Share of the prompt tokens of 30 s that were found in a cache.",
    lines: [
      { name: "on the device", key: "hitRate" },
      { name: "in KV tiers", key: "tierHitRate" },
    ],
    format: percent,
    most: 1,
  },
];

const TILES = {
  uptime: "Up for",
  restarts: "Engine restarts",
  finished: "Requests answered",
  failed: "Ended by errors",
  refused: "Refused, queue full",
  preemptions: "Preemptions",
};

export class Overview {
  constructor() {
    this.history = new History();
    this.charts = CHARTS.map((options) => new Chart(options));
    this.tiles = Object.fromEntries(Object.keys(TILES).map((key) => [key, el("dd", {}, "–")]));
    const tiles = Object.entries(TILES).map(([key, text]) =>
      el("div", { class: "tile" }, el("dt", {}, text), this.tiles[key]),
    );
    byId("tiles").replaceChildren(...tiles);
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.element));
  }

  /** Forget what another caller saw. */
  reset() {
    this.history = new History();
    this.#show();
  }

  pause() {
    this.history.pause();
  }

  /** Read the metrics once. @throws {ApiError} the server does not answer. */
  async refresh() {
    if (!session.caller.may_read_metrics) {
      await this.#showWithoutMetrics();
      return;
    }
    const metrics = parseMetrics(await askText("metrics"));
    this.history.add(sampleOf(metrics, performance.now() / 1000));
    byId("no-metrics").hidden = true;
    byId("figures").hidden = false;
    this.#show();
    this.#showTiles(this.history.last);
    this.#showTiers(metrics);
  }

  #show() {
    for (const chart of this.charts) chart.show(this.history.points);
  }

  #showTiles(sample) {
    const { finished } = sample;
    const answered = (finished.stop ?? 0) + (finished.length ?? 0);
    say(this.tiles.uptime, duration(Date.now() / 1000 - sample.startedAt));
    say(this.tiles.restarts, whole(sample.restarts));
    say(this.tiles.finished, whole(answered));
    say(this.tiles.failed, whole(finished.error ?? 0));
    say(this.tiles.refused, whole(sample.refused));
    say(this.tiles.preemptions, whole(sample.preemptions));
    for (const key of ["restarts", "failed"]) {
      const isBad = !["0", "–"].includes(this.tiles[key].textContent);
      this.tiles[key].parentElement.classList.toggle("warns", isBad);
    }
  }

  #showTiers(metrics) {
    const tiers = tiersOf(metrics);
    byId("tiers").hidden = !tiers.length;
    if (tiers.length) byId("tiers-table").replaceChildren(tiersTable(tiers));
  }

  /** Say why there are no charts, in the server's words, and show what every caller may know. */
  async #showWithoutMetrics() {
    byId("figures").hidden = true;
    byId("no-metrics").hidden = false;
    const load = await askJson("load");
    say(byId("load"), whole(load.server_load));
    say(byId("why-no-metrics"), await reasonWithoutMetrics());
  }
}

let reason = null; // by the key that it was asked with

async function reasonWithoutMetrics() {
  if (reason?.key !== session.key) reason = { key: session.key, text: await askedReason() };
  return reason.text;
}

async function askedReason() {
  try {
    await askText("metrics");
    return "";
  } catch (failure) {
    if (!(failure instanceof ApiError) || !failure.status) throw failure;
    const elsewhere = "This server gives its metrics on a port of their own, --metrics-port.";
    return failure.status === 404 ? elsewhere : failure.message;
  }
}
