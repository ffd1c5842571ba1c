// The requests that are being answered: never what they ask.

import { ask, askJson } from "./api.js";
import { byId, confirmed, el, keepingFocus, say, tell, whileBusy } from "./dom.js";
import { duration, whole } from "./format.js";
import { session } from "./session.js";

const LIMIT = 200;
const WHOSE = {
  all: "",
  "own key": " of your key; an admin key shows all",
  none: "; requests are shown to callers with a key",
};
const COLUMNS = {
  State: (each) => (each.state === "running" ? "▶ running" : "◌ waiting"),
  Age: (each) => duration(each.age_seconds),
  Model: (each) => each.adapter ?? "base model",
  Route: (each) => each.route,
  Prompt: (each) => whole(each.num_prompt_tokens),
  Cached: (each) => whole(each.num_cached_tokens),
  Generated: (each) => whole(each.num_output_tokens),
  Id: (each) => each.id,
};

export class Requests {
  async refresh() {
    const { data, num_requests: number, shows } = await askJson(`v1/requests?limit=${LIMIT}`);
    const newest = number > data.length ? `, of which the newest ${whole(data.length)} are shown` : "";
    say(byId("request-count"), `${whole(number)} in flight${newest}${WHOSE[shows]}.`);
    const table = byId("request-table");
    table.hidden = !data.length;
    const heads = [...Object.keys(COLUMNS).map((text) => el("th", { scope: "col" }, text))];
    if (session.mayChange) {
      heads.push(el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "Abort")));
    }
    table.tHead.replaceChildren(el("tr", {}, ...heads));
    keepingFocus(table.tBodies[0], (body) => body.replaceChildren(...data.map((each) => row(each))));
  }

  reset() {
    byId("request-table").hidden = true;
    say(byId("request-count"), "");
  }
}

function row(each) {
  const cells = Object.entries(COLUMNS).map(([text, shown]) =>
    el("td", { "data-label": text, class: `cell-${text.toLowerCase()}` }, shown(each)),
  );
  if (session.mayChange) {
    const button = el("button", { class: "small danger", "aria-label": `Abort ${each.id}` }, "Abort");
    button.dataset.focus = each.id;
    button.addEventListener("click", () => abort(each, button));
    cells.push(el("td", { class: "cell-action" }, button));
  }
  return el("tr", {}, ...cells);
}

async function abort(each, button) {
  const text = `Its caller gets what was generated so far. Every request with the id ${each.id} ends.`;
  if (!(await confirmed("Abort this request?", text, "Abort"))) return;
  await whileBusy(button, byId("requests-error"), async () => {
    const answer = await ask("abort_requests", { method: "POST", body: { request_ids: [each.id] } });
    const { aborted } = await answer.json();
    tell(aborted ? `${each.id} was aborted.` : `${each.id} had ended by itself.`);
  });
}
