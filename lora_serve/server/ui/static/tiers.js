// The KV tiers as a table: what each holds, gave and refused, by cause.

import { el } from "./dom.js";
import { bytes, whole } from "./format.js";
import { totalsBy } from "./metrics.js";

const NAME = "lora_serve:kv_tier_";
const CAUSES = {
  missed_blocks_total: "not given",
  unsaved_blocks_total: "not kept",
  quarantined_files_total: "set aside",
};

/** What a page of metrics says of each tier; [] where there are none. */
export function tiersOf(metrics) {
  const by = (name) => totalsBy(metrics, NAME + name, "tier");
  const columns = {
    blocks: by("blocks"),
    bytes: by("bytes"),
    capacity: by("capacity_bytes"),
    hits: by("hit_blocks_total"),
    saved: by("saved_blocks_total"),
    evicted: by("evicted_blocks_total"),
    loadOpen: by("load_breaker_open"),
    saveOpen: by("save_breaker_open"),
  };
  return Object.keys(columns.blocks).map((tier) => ({
    tier,
    causes: causesOf(metrics, tier),
    ...Object.fromEntries(Object.entries(columns).map(([key, values]) => [key, values[tier] ?? 0])),
  }));
}

function causesOf(metrics, tier) {
  return Object.entries(CAUSES).flatMap(([name, told]) =>
    (metrics.get(NAME + name) ?? [])
      .filter(({ labels, value }) => labels.tier === tier && value > 0)
      .map(({ labels, value }) => ({ told, cause: labels.cause, count: value })),
  );
}

const HEAD = ["Tier", "State", "Holds", "Blocks given", "Blocks stored", "Evicted", "By cause"];

export function tiersTable(tiers) {
  const rows = tiers.map((each) => {
    const cells = [
      each.tier,
      state(each),
      each.capacity ? `${bytes(each.bytes)} of ${bytes(each.capacity)}` : bytes(each.bytes),
      whole(each.hits),
      whole(each.saved),
      whole(each.evicted),
      each.causes.map(({ told, cause, count }) => `${told}: ${cause} ${whole(count)}`).join("; "),
    ];
    return el("tr", {}, ...cells.map((text, at) => el("td", { "data-label": HEAD[at] }, text || "–")));
  });
  return el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...HEAD.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...rows),
  );
}

function state({ loadOpen, saveOpen }) {
  if (loadOpen && saveOpen) return "⚠ left alone";
  if (loadOpen) return "⚠ nothing read";
  return saveOpen ? "⚠ nothing stored" : "✓ in use";
}
