// One column of the playground: a model, its settings, and its answer as it comes.

import { askEvents } from "./api.js";
import { el, say } from "./dom.js";
import { figure, seconds, whole } from "./format.js";

const LEAST_SECONDS = 0.02; // what came in less than that came at once: it tells no speed
const STATS = {
  first: "First token",
  speed: "Tokens/s",
  prompt: "Prompt",
  cached: "Cached",
  generated: "Generated",
  end: "Ended by",
  version: "Weights",
};

export class AnswerColumn {
  /** @param {HTMLFieldSetElement} settings  @param {HTMLElement} shown  where the answer goes. */
  constructor(settings, shown) {
    this.settings = settings;
    this.same = el("span");
    this.different = el("mark");
    this.error = el("p", { class: "error", role: "alert" });
    this.text = el("div", { class: "answer", tabindex: "0" }, this.same, this.different);
    this.title = el("h3");
    this.stats = Object.fromEntries(Object.keys(STATS).map((key) => [key, el("dd", {}, "–")]));
    const stats = Object.entries(STATS).map(([key, text]) =>
      el("div", {}, el("dt", {}, text), this.stats[key]),
    );
    shown.append(this.title, this.error, this.text, el("dl", { class: "stats" }, ...stats));
    this.answer = { text: "", isOver: false };
  }

  #setting(name) {
    return this.settings.querySelector(`[name=${name}]`).value.trim();
  }

  get model() {
    return this.#setting("model");
  }

  set model(name) {
    this.settings.querySelector("[name=model]").value = name;
  }

  /** Ask, and show what comes. @param {Object} asked  the part of the body that both have. */
  async ask(path, asked, signal, changed) {
    this.#begin();
    const body = { ...asked, model: this.model, stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "max_tokens", "seed"]) {
      if (this.#setting(name) !== "") body[name] = Number(this.#setting(name));
    }
    try {
      await this.#read(askEvents(path, body, signal), changed);
    } catch (failure) {
      if (failure.name === "AbortError") say(this.stats.end, "stopped here");
      else say(this.error, failure.message);
    } finally {
      this.answer = { ...this.answer, isOver: true };
      changed();
    }
  }

  /** Mark the answer from this place on; nothing if it is null or -1. */
  show(difference) {
    const { text } = this.answer;
    const isMarked = difference !== null && difference >= 0;
    say(this.same, isMarked ? text.slice(0, difference) : text);
    say(this.different, isMarked ? text.slice(difference) : "");
  }

  #begin() {
    this.answer = { text: "", isOver: false };
    say(this.title, this.model);
    say(this.error, "");
    this.show(null);
    for (const stat of Object.values(this.stats)) say(stat, "–");
  }

  async #read(events, changed) {
    const asked = performance.now();
    let [first, last] = [null, null];
    for await (const event of events) {
      const choice = event.choices[0];
      const piece = pieceOf(choice);
      if (piece) {
        last = performance.now();
        first ??= last;
        say(this.stats.first, seconds((first - asked) / 1000));
        this.answer = { ...this.answer, text: this.answer.text + piece };
        changed();
      }
      if (event.system_fingerprint) say(this.stats.version, event.system_fingerprint);
      if (choice?.finish_reason) say(this.stats.end, choice.finish_reason);
      if (event.usage) this.#showUsage(event.usage, (last - first) / 1000);
    }
  }

  #showUsage(usage, span) {
    const { prompt_tokens: prompt, completion_tokens: generated } = usage;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    say(this.stats.prompt, whole(prompt));
    say(this.stats.cached, whole(cached));
    say(this.stats.generated, whole(generated));
    say(this.stats.speed, span >= LEAST_SECONDS ? figure((generated - 1) / span) : "–");
  }
}

/** The text that an event of a chat or a completion adds, reasoning included. */
function pieceOf(choice) {
  if (!choice) return "";
  const { delta } = choice;
  if (!delta) return choice.text ?? "";
  return (delta.reasoning_content ?? delta.reasoning ?? "") + (delta.content ?? "");
}
