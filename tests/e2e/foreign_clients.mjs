// JavaScript clients in their default modes; foreign_clients.py runs one case and reads its JSON.
// usage: node foreign_clients.mjs ADDRESS CASE
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [address, wanted] = process.argv.slice(2);
const model = "finwhale-mini";
const key = { apiKey: "unused" };
const say = [{ role: "user", content: "Say hello." }];
const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"] };
const openai = () => new OpenAI({ baseURL: `${address}/v1`, maxRetries: 0, ...key });
const claude = () => new Anthropic({ baseURL: `${address}/anthropic`, maxRetries: 0, ...key });
const answer = tool({ description: "Answer.", inputSchema: z.object({ sure: z.boolean() }) });
const sdk = (make, path) => make({ name: "finwhale", baseURL: `${address}${path}`, ...key });

async function aiTool(language) {
  const { toolCalls, finishReason } = await generateText({
    model: language, messages: say, tools: { answer }, toolChoice: "required",
    maxOutputTokens: 200, maxRetries: 0,
  });
  return { input: toolCalls[0]?.input, finishReason };
}

async function aiStream(language, providerOptions = {}) {
  const result = streamText({
    model: language, messages: say, maxOutputTokens: 48, maxRetries: 0, temperature: 0,
    providerOptions,
  });
  const text = await result.text;
  return { text, reasoning: await result.reasoningText, usage: await result.usage };
}

const cases = {
  async openai_chat_stream() {
    const runner = openai().chat.completions.stream({
      model, messages: say, temperature: 0, max_tokens: 48,
      stream_options: { include_usage: true },
    });
    const usage = await runner.totalUsage();
    return { content: await runner.finalContent(), usage };
  },
  async openai_responses_stream() {
    const stream = openai().responses.stream({
      model, input: "Say hello.", temperature: 0, max_output_tokens: 48,
      reasoning: { summary: "auto" },
    });
    const whole = await stream.finalResponse();
    return { text: whole.output_text, summary: whole.output[0].summary[0].text };
  },
  async openai_models() {
    const names = [];
    for await (const each of openai().models.list()) names.push(each.id);
    return { names };
  },
  async anthropic_stream() {
    const stream = claude().messages.stream({ model, messages: say, max_tokens: 48 });
    const whole = await stream.finalMessage();
    return { kinds: whole.content.map((block) => block.type), usage: whole.usage };
  },
  async anthropic_count() {
    return await claude().messages.countTokens({ model, messages: say });
  },
  async anthropic_models() {
    const names = [];
    for await (const each of claude().models.list({ limit: 1 })) names.push(each.id);
    return { names };
  },
  async anthropic_any_tool() {
    const whole = await claude().messages.create({
      model, messages: say, max_tokens: 200, tool_choice: { type: "any" },
      tools: [{ name: "answer", input_schema: schema }],
    });
    const call = whole.content.find((block) => block.type === "tool_use");
    return { input: call?.input, stop_reason: whole.stop_reason };
  },
  ai_openai: () => aiStream(sdk(createOpenAI, "/v1")(model),
    { openai: { forceReasoning: true, reasoningSummary: "auto" } }),
  ai_openai_chat: () => aiStream(sdk(createOpenAI, "/v1").chat(model)),
  ai_compatible: () => aiStream(sdk(createOpenAICompatible, "/v1")(model)),
  ai_anthropic: () => aiStream(sdk(createAnthropic, "/anthropic/v1")(model)),
  ai_openai_tool: () => aiTool(sdk(createOpenAI, "/v1")(model)),
  ai_compatible_tool: () => aiTool(sdk(createOpenAICompatible, "/v1")(model)),
  ai_anthropic_tool: () => aiTool(sdk(createAnthropic, "/anthropic/v1")(model)),
};

console.log(JSON.stringify(await cases[wanted]()));
