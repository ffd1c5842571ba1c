// Asks the server, with the key of the session.

import { session } from "./session.js";

const ROOT = new URL(".", document.baseURI); // "/", or what a proxy puts before every path
const TIMEOUT_MS = 15000; // of questions for figures; a load or an answer may take longer

/** An answer that is no success, in the server's own words. status is 0 if none came. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Send a request. @returns {Promise<Response>}
 * @throws {ApiError}
 */
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (session.key) headers.Authorization = `Bearer ${session.key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ?? (method === "GET" ? AbortSignal.timeout(TIMEOUT_MS) : undefined),
    });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await errorText(response));
  return response;
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

export async function askText(path, options) {
  return (await ask(path, options)).text();
}

/** The events of a streamed answer, parsed. @throws {ApiError} also for an error amid the stream. */
export async function* askEvents(path, body, signal) {
  const response = await ask(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.startsWith("data: ") ? block.slice(6) : null;
      if (data === null || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 0, event.error.message);
      yield event;
    }
  }
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || `The server answers with status ${response.status}.`;
  }
}
