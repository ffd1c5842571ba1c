// What the charts show: the last minutes of samples, and what can be said between two of them.

import { buckets, increase, quantile, rate, total, totalsBy } from "./metrics.js";

export const SHOWN_SECONDS = 300;
const RATE_SECONDS = 6; // over which rates are taken, so that lines are calm
const LATENCY_SECONDS = 30; // and latencies and shares, so that there is enough to say

/** What the charts need of a page of metrics. @param {number} time  in seconds. */
export function sampleOf(metrics, time) {
  return {
    time,
    generated: total(metrics, "vllm:generation_tokens_total"),
    computed: total(metrics, "lora_serve:computed_tokens_total"),
    running: total(metrics, "vllm:num_requests_running"),
    waiting: total(metrics, "vllm:num_requests_waiting"),
    kvUsage: total(metrics, "vllm:kv_cache_usage_perc"),
    kvTokens: Number(metrics.get("vllm:cache_config_info")?.[0].labels.kv_cache_size_tokens ?? 0),
    isPaused: total(metrics, "lora_serve:is_paused") > 0,
    queries: total(metrics, "vllm:prefix_cache_queries_total"),
    hits: total(metrics, "vllm:prefix_cache_hits_total"),
    tierHits: total(metrics, "vllm:external_prefix_cache_hits_total"),
    firstToken: buckets(metrics, "vllm:time_to_first_token_seconds"),
    interToken: buckets(metrics, "vllm:inter_token_latency_seconds"),
    preemptions: total(metrics, "vllm:num_preemptions_total"),
    restarts: total(metrics, "lora_serve:engine_restarts_total"),
    refused: total(metrics, "vllm:admission_rejections_total"),
    finished: totalsBy(metrics, "vllm:request_success_total", "finished_reason"),
    startedAt: total(metrics, "process_start_time_seconds"),
    adapterRequests: totalsBy(metrics, "lora_serve:adapter_requests_total", "lora_name"),
    adapterQueries: totalsBy(metrics, "lora_serve:adapter_prefix_cache_queries_total", "lora_name"),
    adapterHits: totalsBy(metrics, "lora_serve:adapter_prefix_cache_hits_total", "lora_name"),
  };
}

/** The samples of SHOWN_SECONDS, and the charts' points made of them. */
export class History {
  constructor() {
    this.samples = [];
    this.points = [];
  }

  get last() {
    return this.samples[this.samples.length - 1] ?? null;
  }

  add(sample) {
    if (this.last && sample.time - this.last.time > 2 * RATE_SECONDS) this.pause();
    this.samples.push(sample);
    this.points.push(this.#pointOf(sample));
    const oldest = sample.time - SHOWN_SECONDS - LATENCY_SECONDS;
    while (this.samples[0].time < oldest) this.samples.shift();
    while (this.points[0].time < sample.time - SHOWN_SECONDS) this.points.shift();
  }

  /** Nothing was seen for a while: lines are broken here, and nothing is compared across it. */
  pause() {
    if (!this.last) return;
    this.points.push({ time: this.last.time });
    this.samples = [];
  }

  /** The sample `seconds` before `sample`, or the first one if all are younger; null without any. */
  #before(sample, seconds) {
    const earlier = this.samples.filter((each) => each.time < sample.time);
    return earlier.findLast((each) => each.time <= sample.time - seconds) ?? earlier[0] ?? null;
  }

  #pointOf(sample) {
    const recent = this.#before(sample, RATE_SECONDS);
    const earlier = this.#before(sample, LATENCY_SECONDS);
    const { time, running, waiting, kvUsage } = sample;
    const point = { time, running, waiting, kvUsage };
    if (!recent) return point;
    const span = time - recent.time;
    const generated = rate(recent.generated, sample.generated, span);
    const queries = increase(earlier.queries, sample.queries);
    const shareOfQueries = (name) =>
      queries ? increase(earlier[name], sample[name]) / queries : null;
    return {
      ...point,
      generated,
      // Counted with those of answers, each of which is computed to draw the one after it.
      prompt: Math.max(0, rate(recent.computed, sample.computed, span) - generated),
      firstTokenP50: quantile(0.5, earlier.firstToken, sample.firstToken),
      firstTokenP95: quantile(0.95, earlier.firstToken, sample.firstToken),
      interTokenP50: quantile(0.5, earlier.interToken, sample.interToken),
      interTokenP95: quantile(0.95, earlier.interToken, sample.interToken),
      hitRate: shareOfQueries("hits"),
      tierHitRate: shareOfQueries("tierHits"),
    };
  }
}
