// The paths of the AI SDK, with its provider for servers of OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, jsonSchema, streamText, tool } from "ai";
import {
  ADAPTER, BASE_URL, KEY, MODEL, QUESTION, WEATHER, check, checkWeather, run,
} from "./client_paths.mjs";

const ours = createOpenAICompatible({
  name: "ours", baseURL: BASE_URL, apiKey: KEY, supportsStructuredOutputs: true,
});
const asked = { model: ours.chatModel(MODEL), prompt: QUESTION, maxOutputTokens: 16, maxRetries: 0 };
const long = { ...asked, maxOutputTokens: 96, temperature: 0 };
const weather = tool({ description: "Tell the weather.", inputSchema: jsonSchema(WEATHER) });
const withTools = { ...long, tools: { weather }, toolChoice: "required" };

async function failing(stream) {
  for await (const part of stream) if (part.type === "error") throw part.error;
}

await run({
  async chat() {
    const answer = await generateText(asked);
    check(answer.text && answer.usage.outputTokens <= 16, answer.text);
  },
  async stream() {
    const answer = streamText(asked);
    await failing(answer.fullStream);
    check(await answer.text, "no text");
  },
  async adapter() {
    check((await generateText({ ...asked, model: ours.chatModel(ADAPTER) })).text, "no text");
  },
  async completions() {
    const model = ours.completionModel(MODEL);
    check((await generateText({ ...asked, model })).usage.outputTokens, "no tokens");
  },
  async tools() {
    const answer = await generateText(withTools);
    checkWeather(answer.toolCalls[0].input);
  },
  async stream_tools() {
    const answer = streamText(withTools);
    await failing(answer.fullStream);
    checkWeather((await answer.toolCalls)[0].input);
  },
  async structured() {
    const schema = jsonSchema(WEATHER);
    const answer = await generateText({ ...long, output: Output.object({ schema }) });
    checkWeather(answer.output);
  },
  async embeddings() {
    const model = ours.embeddingModel(MODEL);
    const { embeddings } = await embedMany({ model, values: ["one", "two"], maxRetries: 0 });
    check(embeddings.length === 2 && embeddings[0].length === 576, embeddings.length);
  },
});
