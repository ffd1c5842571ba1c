// The paths of OpenAI's client for Node.
import OpenAI, { NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ADAPTER, BASE_URL, KEY, MODEL, QUESTION, WEATHER, check, checkWeather, run,
} from "./client_paths.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: QUESTION }], max_tokens: 16 };
const tool = { name: "weather", description: "Tell the weather.", parameters: WEATHER };
const tools = [{ type: "function", function: tool }];
const City = z.object({ name: z.string().max(12), is_capital: z.boolean() });
const input = { model: MODEL, input: QUESTION, max_output_tokens: 16 };

await run({
  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    check(found.includes(MODEL) && found.includes(ADAPTER), found);
  },
  async chat() {
    const answer = await client.chat.completions.create(asked);
    check(answer.choices[0].message.content, answer);
  },
  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      text += chunk.choices[0]?.delta.content ?? "";
    check(text, text);
    const events = client.chat.completions.stream(asked);
    check(await events.finalContent(), "no content");
  },
  async adapter() {
    const answer = await client.chat.completions.create({ ...asked, model: ADAPTER });
    check(answer.model === ADAPTER, answer);
  },
  async completions() {
    const answer = await client.completions.create({ model: MODEL, prompt: QUESTION, logprobs: 2 });
    check(answer.choices[0].logprobs.tokens.length, answer);
  },
  async tools() {
    const answer = await client.chat.completions.create({
      ...asked, max_tokens: 96, temperature: 0, tools, tool_choice: "required",
    });
    checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async stream_tools() {
    const named = { type: "function", function: { name: "weather" } };
    const events = client.chat.completions.stream({
      ...asked, max_tokens: 96, temperature: 0, tools, tool_choice: named,
    });
    const answer = await events.finalChatCompletion();
    checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async structured() {
    const answer = await client.chat.completions.parse({
      ...asked, max_tokens: 96, temperature: 0, response_format: zodResponseFormat(City, "city"),
    });
    check(typeof answer.choices[0].message.parsed.is_capital === "boolean", answer);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
    check(answer.data.length === 2 && answer.data[0].embedding.length === 576, answer.data.length);
  },
  async responses() {
    const answer = await client.responses.create(input);
    check(answer.output_text, answer);
  },
  async stream_responses() {
    const kinds = [];
    for await (const event of await client.responses.create({ ...input, stream: true }))
      kinds.push(event.type);
    check(kinds[0] === "response.created", kinds);
    check(kinds.includes("response.output_text.delta"), kinds);
    check((await client.responses.stream(input).finalResponse()).output_text, kinds);
  },
  async tools_responses() {
    const answer = await client.responses.create({
      ...input, max_output_tokens: 96, temperature: 0, tools: [{ type: "function", ...tool }],
      tool_choice: "required",
    });
    checkWeather(answer.output.find((item) => item.type === "function_call").arguments);
  },
  async errors() {
    try {
      await client.chat.completions.create({ ...asked, model: "nowhere" });
    } catch (error) {
      check(error instanceof NotFoundError && error.message.includes("nowhere"), error.message);
      return;
    }
    throw new Error("no error");
  },
});
