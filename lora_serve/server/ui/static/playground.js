// Asks two models, or two versions of an adapter, the same, side by side.

import { askJson } from "./api.js";
import { AnswerColumn } from "./answer.js";
import { firstDifference } from "./difference.js";
import { byId, el, say } from "./dom.js";
import { whole } from "./format.js";

const NAMES_SECONDS = 30; // for which the names that are served are kept

export class Playground {
  constructor() {
    this.columns = ["left", "right"].map(
      (side) => new AnswerColumn(byId(`settings-${side}`), byId(`answer-${side}`)),
    );
    this.controller = null;
    this.isDrawn = true;
    this.namesAt = -Infinity;
    const form = byId("playground-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    byId("playground").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.controller?.abort();
    });
    byId("stop").addEventListener("click", () => this.controller?.abort());
    for (const kind of form.elements.kind) {
      kind.addEventListener("change", () => {
        byId("system-field").hidden = form.elements.kind.value !== "chat";
      });
    }
  }

  /** Offer the names that are served, unless they were asked for a moment ago. */
  async refresh() {
    const now = performance.now() / 1000;
    if (now - this.namesAt < NAMES_SECONDS) return;
    this.namesAt = now;
    const { data } = await askJson("v1/models");
    byId("models").replaceChildren(...data.map((card) => el("option", { value: card.id })));
    const adapters = data.filter((card) => card.digest !== undefined);
    const wanted = [adapters[0] ?? data[0], adapters[1] ?? data[0]].map((card) => card.id);
    this.columns.forEach((column, index) => {
      if (!column.model) column.model = wanted[index];
    });
  }

  reset() {
    this.controller?.abort();
    this.namesAt = -Infinity;
    for (const column of this.columns) column.model = "";
  }

  async #ask() {
    if (this.controller) return;
    const form = byId("playground-form");
    const isChat = form.elements.kind.value === "chat";
    const prompt = byId("prompt").value;
    const system = byId("system").value;
    const messages = [{ role: "user", content: prompt }];
    if (system) messages.unshift({ role: "system", content: system });
    const [path, asked] = isChat ? ["v1/chat/completions", { messages }] : ["v1/completions", { prompt }];
    this.controller = new AbortController();
    this.#setBusy(true);
    const { signal } = this.controller;
    const changed = () => this.#changed();
    await Promise.all(this.columns.map((column) => column.ask(path, asked, signal, changed)));
    this.controller = null;
    this.#setBusy(false);
    this.#draw();
  }

  #setBusy(isBusy) {
    byId("ask").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("answers").hidden = false;
    if (isBusy) say(byId("difference"), "Waiting for the answers …");
  }

  /** Draw once for all that comes before the next picture. */
  #changed() {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => {
      this.isDrawn = true;
      this.#draw();
    });
  }

  #draw() {
    const difference = firstDifference(...this.columns.map((column) => column.answer));
    for (const column of this.columns) column.show(difference);
    const isOver = this.columns.every((column) => column.answer.isOver);
    if (difference === -1) say(byId("difference"), "The answers are equal.");
    else if (difference === null) say(byId("difference"), isOver ? "" : "The answers are equal so far.");
    else say(byId("difference"), `The answers differ from character ${whole(difference + 1)} on.`);
  }
}
