// What Node's clients make of a server: `node clients.mjs URL` prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const url = process.argv[2];
const model = "asyncllm-demo";
const messages = [{ role: "user", content: "What is 27 + 45?" }];
const city = z.object({ city: z.string().max(12), days: z.number().int().min(3).max(40) });
const parameters = z.toJSONSchema(city);

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const whole = await client.chat.completions.create({ model, messages });
  let streamed = "";
  let usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ model, messages, ...options })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const called = await client.chat.completions.create({
    model,
    messages,
    seed: 1,
    tools: [{ type: "function", function: { name: "weather", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const runner = client.chat.completions.stream({
    model,
    messages,
    seed: 1,
    response_format: { type: "json_schema", json_schema: { name: "city", schema: parameters } },
  });
  const final = await runner.finalChatCompletion();
  const response = await client.responses.create({ model, input: "What is 27 + 45?" });
  let refused = null;
  try {
    await client.chat.completions.create({ model: "nobody", messages });
  } catch (error) {
    refused = { status: error.status, code: error.code, param: error.param };
  }
  return {
    text: whole.choices[0].message.content,
    streamed,
    total: usage.total_tokens,
    finish: called.choices[0].finish_reason,
    call: called.choices[0].message.tool_calls[0].function,
    json: JSON.parse(final.choices[0].message.content),
    response: response.output_text,
    refused,
  };
}

async function ai() {
  const provider = createOpenAICompatible({
    name: "asyncllm",
    baseURL: `${url}/v1`,
    supportsStructuredOutputs: true,
  });
  const prompt = "What is 27 + 45?";
  const whole = await generateText({ model: provider(model), prompt, maxRetries: 0 });
  const stream = streamText({ model: provider(model), prompt, maxRetries: 0 });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  const called = await generateText({
    model: provider(model),
    prompt,
    seed: 1,
    tools: { weather: tool({ inputSchema: city }) },
    toolChoice: { type: "tool", toolName: "weather" },
    maxRetries: 0,
  });
  const found = await generateObject({
    model: provider(model),
    prompt,
    seed: 1,
    schema: city,
    maxRetries: 0,
  });
  return {
    text: whole.text,
    streamed,
    tokens: whole.usage.totalTokens,
    finish: called.finishReason,
    call: { name: called.toolCalls[0].toolName, input: called.toolCalls[0].input },
    object: found.object,
  };
}

console.log(JSON.stringify({ openai: await openai(), ai: await ai() }));
