// The paths of LangChain for Node, over chats, responses and embeddings.
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { ADAPTER, BASE_URL, KEY, MODEL, QUESTION, WEATHER, check, checkWeather, run } from "./client_paths.mjs";

const ours = { apiKey: KEY, configuration: { baseURL: BASE_URL }, maxRetries: 0 };
const short = new ChatOpenAI({ ...ours, model: MODEL, maxTokens: 16 });
const long = new ChatOpenAI({ ...ours, model: MODEL, maxTokens: 96, temperature: 0 });
const responses = new ChatOpenAI({
  ...ours, model: MODEL, maxTokens: 96, temperature: 0, useResponsesApi: true,
});
const weather = { name: "weather", description: "Tell the weather.", parameters: WEATHER };
const tools = [{ type: "function", function: weather }];
const schema = { title: "weather", ...WEATHER };

async function all(stream) {
  let whole;
  for await (const chunk of await stream) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
}

await run({
  async chat() {
    const answer = await short.invoke(QUESTION);
    check(answer.content && answer.usage_metadata.output_tokens <= 16, answer);
  },
  async stream() {
    check((await all(short.stream(QUESTION))).content, "no content");
  },
  async adapter() {
    check((await new ChatOpenAI({ ...ours, model: ADAPTER, maxTokens: 8 }).invoke(QUESTION)).content, "");
  },
  async completions() {
    const model = new OpenAI({ ...ours, model: MODEL, maxTokens: 8, temperature: 0 });
    check((await model.invoke("One, two, three,")).length, "no text");
  },
  async tools() {
    const answer = await long.bindTools(tools, { tool_choice: "any" }).invoke(QUESTION);
    checkWeather(answer.tool_calls[0].args);
  },
  async stream_tools() {
    const bound = long.bindTools(tools, { tool_choice: "weather" });
    checkWeather((await all(bound.stream(QUESTION))).tool_calls[0].args);
  },
  async structured() {
    for (const method of ["jsonSchema", "functionCalling"])
      checkWeather(await long.withStructuredOutput(schema, { method, name: "weather" }).invoke(QUESTION));
  },
  async embeddings() {
    const model = new OpenAIEmbeddings({ ...ours, model: MODEL });
    const rows = await model.embedDocuments(["one", "two"]);
    check(rows.length === 2 && rows[0].length === 576, rows.length);
  },
  async responses() {
    check((await responses.invoke(QUESTION)).text, "no text");
  },
  async stream_responses() {
    check((await all(responses.stream(QUESTION))).text, "no text");
  },
  async tools_responses() {
    const answer = await responses.bindTools(tools, { tool_choice: "weather" }).invoke(QUESTION);
    checkWeather(answer.tool_calls[0].args);
  },
});
