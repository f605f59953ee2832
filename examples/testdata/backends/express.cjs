// Express as it comes: routes ignore case and a trailing slash, and a path is never cleaned.
const express = require("express");
const app = express();
app.disable("etag");
const serve = (name) => (request, response) => {
  if (request.get("X-Hold")) return; // runs until its client leaves
  const isGuess = name === "login" && !!request.get("Authorization");
  const isForm = name === "login" && !isGuess && ["GET", "HEAD", "OPTIONS"].includes(request.method);
  response.set("X-Served", isForm ? "form" : name).set("X-Cost", "7");
  response.status(isGuess ? 401 : 200).json({ usage: { prompt_tokens: 1000, completion_tokens: 7000, total_tokens: 8000 } });
};
for (const name of ["health", "login", "graphql"]) app.all("/" + name, serve(name));
app.all("/v1/models", serve("models"));
for (const name of ["burst", "files", "checkout"]) app.use("/" + name, serve(name));
app.use(serve("work"));
app.listen(Number(process.argv[2]), "127.0.0.1");
