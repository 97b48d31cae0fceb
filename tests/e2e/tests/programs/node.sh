# shellcheck shell=bash
cat >work.js <<'END'
const http = require("http"), fs = require("fs"), crypto = require("crypto");
const { Worker, isMainThread, parentPort } = require("worker_threads");
const { execFileSync } = require("child_process");
if (!isMainThread) { parentPort.postMessage(crypto.createHash("sha256").update("x").digest("hex")); return; }
(async () => {
    console.log(await new Promise(done => new Worker(__filename).on("message", done)));
    const changed = new Promise(done => fs.watch("/tmp", (_, name) => { if (name === "seen") done(name); }));
    fs.writeFileSync("/tmp/seen", "x");
    console.log("watched", await changed);
    const server = http.createServer((_, answer) => answer.end("hello")).listen(0, "127.0.0.1", () => {
        http.get({ host: "127.0.0.1", port: server.address().port }, answer => answer.on("data", data => {
            console.log(String(data), execFileSync("id", ["-u"]).toString().trim());
            process.exit(4);
        }));
    });
})();
END
node work.js || echo "exit $?"
