// Package redistest runs real redis-server processes, and network faults in
// front of them, for tests, benchmarks and demonstrations: single servers,
// primaries with replicas ([Shard]), [Sentinels] that watch these, and a
// [Cluster]. An [Authority] makes the certificates of servers that speak TLS.
//
// Every server listens on a loopback port of its own and keeps its files in a
// temporary directory of its own. Both the process and the directory vanish
// with [Server.Stop], and also when the program that launched the server ends
// in any other way: a panic, os.Exit, or a SIGKILL.
//
// Functions whose names begin with Launch or New return errors and suit any
// program. Those whose names begin with Start are for tests and benchmarks: they
// fail them and stop what they started when the test ends.
//
// The redis-server program, 7.0 or newer, must be on the PATH. The package is
// for Unix systems.
package redistest
