package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/internal/redis"
	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
)

func TestEveryEventLogsALine(t *testing.T) {
	core, lines := observer.New(zapcore.DebugLevel)
	l := startShardLog(zap.New(core), telemetry.Events{}, "default", redis.New(redis.Options{}))
	fault := errors.New("no")
	for _, test := range []struct {
		event wire.Event
		want  string
	}{
		{wire.Event{Kind: wire.ServerDown, Addr: "redis-a:6379", Purpose: wire.PurposeCharges, Err: fault}, "warn server is left out map[address:redis-a:6379 error:no purpose:charges shard:a store:default]"},
		{wire.Event{Kind: wire.ServerUp, Addr: "redis-a:6379", Purpose: wire.PurposeChecks}, "info server is back map[address:redis-a:6379 purpose:checks shard:a store:default]"},
		{wire.Event{Kind: wire.ReplicaLags, Addr: "redis-a:6379", Purpose: wire.PurposeChecks, Err: fault}, "warn replica lags and is left out map[address:redis-a:6379 error:no purpose:checks shard:a store:default]"},
		{wire.Event{Kind: wire.ReplicaCaughtUp, Addr: "redis-a:6379", Purpose: wire.PurposeChecks}, "info replica has caught up map[address:redis-a:6379 purpose:checks shard:a store:default]"},
		{wire.Event{Kind: wire.PrimaryChanged, Addr: "redis-a:6379"}, "info shard has another primary map[address:redis-a:6379 shard:a store:default]"},
		{wire.Event{Kind: wire.DiscoveryFailed, Err: fault}, "warn servers cannot be found map[error:no shard:a store:default]"},
		{wire.Event{Kind: wire.Discovered}, "info servers are found again map[shard:a store:default]"},
		{wire.Event{Kind: wire.Misconfigured, Addr: "redis-a:6379", Err: fault}, "warn server is misconfigured map[address:redis-a:6379 error:no shard:a store:default]"},
		{wire.Event{Kind: wire.Mended, Addr: "redis-a:6379", Err: fault}, "info server is no longer misconfigured map[address:redis-a:6379 error:no shard:a store:default]"},
		{wire.Event{Kind: wire.Panicked, Addr: "redis-a:6379", Err: fault}, "error a panic was contained: report it, with this line map[address:redis-a:6379 error:no shard:a store:default]"},
		{wire.Event{Kind: wire.Met, Addr: "redis-a:6379", ID: "x"}, ""},
	} {
		l.log(l.logger.With(zap.String("shard", "a")), test.event)
		got := ""
		for _, line := range lines.TakeAll() {
			got += fmt.Sprintf("%s %s %v", line.Level, line.Message, line.ContextMap())
		}
		if got != test.want {
			t.Errorf("%+v is logged as %q, want %q", test.event, got, test.want)
		}
	}
}

// TestTwinsAreReportedOnce by each config, also by one whose shards have met their
// servers before.
func TestTwinsAreReportedOnce(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr())
	var members []redis.Member
	var shards []pooledShard
	for i, addr := range []string{server.Addr(), proxy.Addr()} {
		shard := redis.NewShard(redis.ShardOptions{Primary: addr, DialTimeout: time.Minute})
		t.Cleanup(func() { shard.Close(context.Background()) })
		shards = append(shards, pooledShard{Shard: shard})
		members = append(members, redis.Member{Name: fmt.Sprint(i), Shard: shard})
	}
	for range 2 {
		core, lines := observer.New(zapcore.DebugLevel)
		s := redis.New(redis.Options{Members: members})
		l := startShardLog(zap.New(core), telemetry.Events{}, "default", s)
		for i, shard := range shards {
			l.add(members[i].Name, shard)
		}
		s.Warm(t.Context())
		redistest.Eventually(t, "the twins are reported", func() error {
			if lines.FilterLevelExact(zapcore.ErrorLevel).Len() == 0 {
				return errors.New("they are not")
			}
			return nil
		})
		l.lookForTwins()
		logged := lines.FilterLevelExact(zapcore.ErrorLevel).All()
		if len(logged) != 1 || logged[0].Message != "two shards are the same server: give each its own, or remove one of the shards" {
			t.Fatalf("logged %v", logged)
		}
		fields := logged[0].ContextMap()
		if addrs := []any{fields["address"], fields["other_address"]}; !slices.Contains(addrs, any(server.Addr())) || !slices.Contains(addrs, any(proxy.Addr())) {
			t.Errorf("logged with %v", fields)
		}
		l.stop()
	}
}

// TestCertificateFaultIsReportedOnce, however many shards use the certificate.
func TestCertificateFaultIsReportedOnce(t *testing.T) {
	core, lines := observer.New(zapcore.DebugLevel)
	l := startShardLog(zap.New(core), telemetry.Events{}, "default", redis.New(redis.Options{}))
	one, other := &certificates{files: [3]string{"", "cert.pem", "key.pem"}}, &certificates{files: [3]string{"", "cert.pem", "key.pem"}}
	fault := errors.New("read cert cert.pem: garbage")
	for _, c := range []*certificates{one, other} {
		l.logCertificates(c, fault)
	}
	if logged := lines.TakeAll(); len(logged) != 1 || logged[0].Level != zapcore.WarnLevel {
		t.Errorf("logged %v", logged)
	}
	for _, c := range []*certificates{one, other} {
		l.logCertificates(c, nil)
	}
	if logged := lines.TakeAll(); len(logged) != 1 || logged[0].Level != zapcore.InfoLevel {
		t.Errorf("logged %v", logged)
	}
}
