// The table of adapters: search, order, pages; for admins what changes them.

import { askJson } from "./api.js";
import { AdapterDialog } from "./adapter_dialog.js";
import { changesList } from "./changes.js";
import { byId, el, keepingFocus, say } from "./dom.js";
import { percent, version, whole } from "./format.js";
import { session } from "./session.js";

const PAGE_ROWS = 50;
const MANY = 1000; // of so many, the list is asked for less often
const REFRESH_SECONDS = 5;
const REFRESH_MANY_SECONDS = 30;

const COLUMNS = [
  { key: "name", text: "Name" },
  { key: "version", text: "Version" },
  { key: "rank", text: "Rank" },
  { key: "residency", text: "Weights" },
  { key: "leases", text: "In use by" },
  { key: "requests", text: "Answered" },
  { key: "hitRate", text: "Prefix hits" },
  { key: "source", text: "Source" },
];
const SHOWN = {
  version: (row) => version(row.digest, row.generation),
  rank: (row) => whole(row.rank),
  residency: (row) => `${row.residency === "resident" ? "● in memory" : "○ evicted"}${row.pinned ? ", pinned" : ""}`,
  leases: (row) => whole(row.leases),
  requests: (row) => whole(row.requests),
  hitRate: (row) => percent(row.hitRate),
};

export class Adapters {
  /** @param {function(): ?Object} lastSample  of the metrics, for hits; null without any. */
  constructor(lastSample) {
    this.lastSample = lastSample;
    this.rows = null; // until they are known
    this.page = 0;
    this.order = { key: "name", ascending: true };
    this.askedAt = -Infinity;
    this.dialog = new AdapterDialog(() => this.refresh(true));
    byId("adapter-search").addEventListener("input", () => this.#turnTo(0));
    byId("page-back").addEventListener("click", () => this.#turnTo(this.page - 1));
    byId("page-on").addEventListener("click", () => this.#turnTo(this.page + 1));
    byId("load-adapter").addEventListener("click", () => this.dialog.openForLoad());
    byId("reset-all").addEventListener("click", () => this.dialog.resetEverything());
  }

  /** Ask for the list, unless it is new enough. */
  async refresh(atOnce = false) {
    const wait = this.rows?.length > MANY ? REFRESH_MANY_SECONDS : REFRESH_SECONDS;
    const now = performance.now() / 1000;
    if (!atOnce && now - this.askedAt < wait) return;
    this.askedAt = now;
    const { data } = await askJson("v1/models");
    this.rows = data.filter((card) => card.digest !== undefined).map((card) => this.#row(card));
    byId("adapter-admin").hidden = !session.mayChange;
    this.#show();
    this.dialog.update(this.rows);
    await this.#showChanges();
  }

  async #showChanges() {
    const { data } = session.mayChange ? await askJson("adapter_changes") : { data: [] };
    byId("all-changes").hidden = !data.length;
    const loaded = new Set(this.rows.map((row) => row.name));
    const loadAgain = (name, path) => this.dialog.openForLoad(name, path);
    keepingFocus(byId("all-changes-list"), (list) =>
      list.replaceChildren(...changesList(data, loaded, loadAgain)),
    );
  }

  /** Forget what another caller saw. */
  reset() {
    this.rows = null;
    this.askedAt = -Infinity;
    this.dialog.close();
    this.#show();
  }

  #row(card) {
    const sample = this.lastSample();
    const queries = sample?.adapterQueries[card.id];
    return {
      name: card.id,
      digest: card.digest,
      generation: card.generation,
      rank: card.rank,
      residency: card.residency,
      pinned: card.pinned,
      leases: card.num_leases,
      bytes: card.num_bytes,
      created: card.created,
      source: card.root,
      requests: sample?.adapterRequests[card.id],
      hitRate: queries ? (sample.adapterHits[card.id] ?? 0) / queries : undefined,
    };
  }

  #turnTo(page) {
    this.page = page;
    this.#show();
  }

  #show() {
    const found = this.rows === null ? [] : this.#found();
    const last = Math.max(0, Math.ceil(found.length / PAGE_ROWS) - 1);
    this.page = Math.min(Math.max(0, this.page), last);
    const start = this.page * PAGE_ROWS;
    const rows = found.slice(start, start + PAGE_ROWS);
    this.#showTable(rows);
    const end = start + rows.length;
    const of = `of ${whole(found.length)} adapters`;
    say(byId("adapter-count"), rows.length ? `${whole(start + 1)}–${whole(end)} ${of}` : "");
    byId("page-back").disabled = this.page === 0;
    byId("page-on").disabled = this.page === last;
    byId("adapter-pages").hidden = last === 0;
  }

  #found() {
    const searched = byId("adapter-search").value.toLowerCase();
    const found = this.rows.filter((row) =>
      [row.name, row.digest, row.source].some((text) => text?.toLowerCase().includes(searched)),
    );
    const { key, ascending } = this.order;
    const value = key === "version" ? (row) => row.digest : (row) => row[key];
    const sign = ascending ? 1 : -1;
    return found.sort((one, other) => sign * compared(value(one), value(other)) || compared(one.name, other.name));
  }

  #showTable(rows) {
    const columns = COLUMNS.filter(
      ({ key }) => key === "version" || this.rows?.some((row) => row[key] !== undefined),
    );
    const table = byId("adapter-table");
    byId("no-adapters").hidden = rows.length > 0;
    table.hidden = !rows.length;
    const none = this.rows === null ? "Asking …" : "No adapter is loaded.";
    say(byId("no-adapters"), this.rows?.length ? "No adapter matches." : none);
    keepingFocus(table, () => {
      table.tHead.replaceChildren(this.#head(columns));
      table.tBodies[0].replaceChildren(...rows.map((row) => this.#tableRow(row, columns)));
    });
  }

  #head(columns) {
    const cells = columns.map(({ key, text }) => {
      const isChosen = this.order.key === key;
      const sort = isChosen ? (this.order.ascending ? "ascending" : "descending") : "none";
      const mark = isChosen ? (this.order.ascending ? " ▲" : " ▼") : "";
      const button = el("button", { class: "sort", onclick: () => this.#orderBy(key) }, text + mark);
      button.dataset.focus = `sort ${key}`;
      return el("th", { scope: "col", "aria-sort": sort }, button);
    });
    const details = el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "Details"));
    return el("tr", {}, ...cells, details);
  }

  #orderBy(key) {
    const ascending = this.order.key === key ? !this.order.ascending : true;
    this.order = { key, ascending };
    this.#turnTo(0);
  }

  #tableRow(row, columns) {
    const cells = columns.map(({ key, text }) => {
      const shown = SHOWN[key]?.(row) ?? row[key];
      const props = { "data-label": text, class: `cell-${key}` };
      if (key === "version") props.title = row.digest;
      return el(key === "name" ? "th" : "td", key === "name" ? { ...props, scope: "row" } : props, shown);
    });
    const text = session.mayChange ? "Manage" : "Details";
    const open = () => this.dialog.open(row);
    const button = el("button", { class: "small", "aria-label": `${text} ${row.name}`, onclick: open }, text);
    button.dataset.focus = `row ${row.name}`;
    return el("tr", {}, ...cells, el("td", { class: "cell-action" }, button));
  }
}

function compared(one, other) {
  if (one === other) return 0;
  if (one === undefined) return 1;
  if (other === undefined) return -1;
  return typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
}
