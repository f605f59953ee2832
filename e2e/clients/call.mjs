// Calls a URL by one of the clients that people use, which tries again when it is refused, as it does
// by default or as its documentation says. Prints the last status, or by `parsed` what
// ratelimit-header-parser reads from the response.
//
//	node call.mjs <client> <url> <name> <value> ...   with request headers
import {Octokit} from "@octokit/core";
import {retry} from "@octokit/plugin-retry";
import {throttling} from "@octokit/plugin-throttling";
import axios from "axios";
import axiosRetry from "axios-retry";
import got from "got";
import ky from "ky";
import pRetry, {AbortError} from "p-retry";
import {parseRateLimit} from "ratelimit-header-parser";
import {Agent, RetryAgent, request} from "undici";

const [client, url, ...rest] = process.argv.slice(2);
const headers = {};
for (let i = 0; i < rest.length; i += 2) {
	headers[rest[i]] = rest[i + 1];
}
const retries = 2;

async function callByOctokit(...plugins) {
	const again = (_after, _options, _octokit, count) => count < retries;
	const octokit = new (Octokit.plugin(...plugins))({
		baseUrl: url, throttle: {onRateLimit: again, onSecondaryRateLimit: again, fallbackSecondaryRateRetryAfter: 1},
		log: {debug() {}, info() {}, warn() {}, error() {}},
	});
	return (await octokit.request("GET /", {headers})).status;
}

const clients = {
	"octokit throttling"() {
		return callByOctokit(throttling);
	},
	// As the package octokit has them.
	"octokit retry, throttling"() {
		return callByOctokit(retry, throttling);
	},
	async got() {
		return (await got(url, {headers, throwHttpErrors: false, retry: {limit: retries}})).statusCode;
	},
	async ky() {
		return (await ky(url, {headers, throwHttpErrors: true, retry: {limit: retries}})).status;
	},
	async axios() {
		axiosRetry(axios, {retries, retryDelay: axiosRetry.exponentialDelay, retryCondition: e => e.response?.status === 429});
		return (await axios.get(url, {headers})).status;
	},
	async undici() {
		const dispatcher = new RetryAgent(new Agent(), {maxRetries: retries, statusCodes: [429]});
		return (await request(url, {headers, dispatcher})).statusCode;
	},
	async "p-retry"() {
		return pRetry(async () => {
			const response = await fetch(url, {headers});
			if (response.status === 429) {
				const after = Number(response.headers.get("retry-after") ?? NaN);
				if (Number.isNaN(after)) {
					throw new AbortError(Object.assign(new Error("refused for good"), {status: 429}));
				}
				await new Promise(resolve => setTimeout(resolve, after * 1000));
				throw Object.assign(new Error("refused"), {status: 429});
			}
			return response.status;
		}, {retries, minTimeout: 0});
	},
	async "ratelimit-header-parser"() {
		for (let i = 0; ; i++) {
			const response = await fetch(url, {headers});
			const reset = parseRateLimit(response)?.reset?.getTime();
			if (response.status !== 429 || i === retries || !(reset > 0)) {
				return response.status;
			}
			await new Promise(resolve => setTimeout(resolve, reset - Date.now()));
		}
	},
	async parsed() {
		const read = parseRateLimit(await fetch(url, {headers}));
		return read ? [read.limit, read.used, read.remaining, read.reset.getTime() / 1000].join(" ") : "nothing";
	},
};

try {
	console.log(await clients[client]());
} catch (e) {
	const status = e.status ?? e.response?.status ?? e.statusCode;
	if (status === undefined) {
		throw e;
	}
	console.log(status);
}
