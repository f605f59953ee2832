package redisstore

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestURLs(t *testing.T) {
	for text, want := range map[string]struct {
		addr, username, password string
		db                       int
		isTLS                    bool
	}{
		"redis://localhost":                          {addr: "localhost:6379", db: -1},
		"redis://localhost/":                         {addr: "localhost:6379", db: -1},
		"redis://localhost:7000/0":                   {addr: "localhost:7000"},
		"rediss://limiter:s%3Acret@redis.test:1/12":  {addr: "redis.test:1", username: "limiter", password: "s:cret", db: 12, isTLS: true},
		"redis://:secret@[::1]":                      {addr: "[::1]:6379", password: "secret", db: -1},
		"rediss://default:a%40b%2Fc@[2001:db8::1]:9": {addr: "[2001:db8::1]:9", username: "default", password: "a@b/c", db: -1, isTLS: true},
	} {
		s, err := parseURL(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		db := -1
		if s.db != nil {
			db = *s.db
		}
		if s.addr != want.addr || s.username != want.username || s.password != want.password || db != want.db || s.isTLS != want.isTLS {
			t.Errorf("%s is %+v with database %d", text, s, db)
		}
	}
	for _, text := range []string{
		"", "localhost:6379", "redis:", "redis://", "redis:///3", "http://localhost", "unix:///run/redis.sock", "redis://secret@", "redis://user@localhost",
		"redis://user:secret@localhost/x", "redis://user:secret@localhost/-1", "redis://user:secret@localhost/1/2", "redis://user:secret@localhost/99999999999",
		"redis://user:secret@localhost:0", "redis://user:secret@localhost:70000", "redis://user:secret@localhost?db=1", "redis://user:secret@localhost#1",
		"redis://user:secret@local host", "redis://us%er:secret@localhost", "redis://user:secret@local%00host", "redis+srv://user:secret@localhost",
	} {
		if s, err := parseURL(text); err == nil {
			t.Errorf("%q is %+v", text, s)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: the error has the password in it: %v", text, err)
		}
	}
}

// TestURLIsReadForEachConnection: its password may change, its address may not.
func TestURLIsReadForEachConnection(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	write := func(text string) {
		t.Helper()
		redistest.Must(t, os.WriteFile(file, []byte(text), 0o600))
	}
	write("redis://limiter:first@localhost:7000/3\n")
	s := &Store{Shards: []*Shard{{Name: "a", URL: "{file." + file + "}"}}}
	redistest.Must(t, s.provision(&loader{repl: caddy.NewReplacer()}))
	redistest.Must(t, s.Validate())
	opts := s.reach(s.Shards[0]).options(nil)
	if opts.Primary != "localhost:7000" || opts.DB != 3 || opts.TLS != nil {
		t.Errorf("the shard is at %s, database %d, TLS %v", opts.Primary, opts.DB, opts.TLS)
	}
	for _, password := range []string{"first", "second"} {
		write("redis://limiter:" + password + "@localhost:7000/3")
		username, got, err := opts.Credentials(t.Context())
		if err != nil || username != "limiter" || got != password {
			t.Errorf("credentials %q, %q, %v, want %q", username, got, err, password)
		}
	}
	for _, broken := range []string{"", "redis://limiter:third@"} {
		write(broken)
		if _, password, err := opts.Credentials(t.Context()); err == nil || password != "" || strings.Contains(err.Error(), "third") {
			t.Errorf("a file with %q yields %q, %v", broken, password, err)
		}
	}
}

// TestURLAndSettingsOfTheStore: a shard inherits what its URL does not say.
func TestURLAndSettingsOfTheStore(t *testing.T) {
	t.Setenv("SHARDLIMIT_TEST_URL", "rediss://localhost:7000")
	db := 5
	s := &Store{
		Connection: Connection{Username: "limiter", Password: "secret", DB: &db},
		Shards:     []*Shard{{Name: "a", URL: "{env.SHARDLIMIT_TEST_URL}"}, {Name: "b", URL: "redis://:other@localhost:7001/6"}},
	}
	redistest.Must(t, s.provision(&loader{repl: caddy.NewReplacer()}))
	redistest.Must(t, s.Validate())
	for i, want := range []struct {
		username, password string
		db                 int
		isTLS              bool
	}{{"limiter", "secret", 5, true}, {"", "other", 6, false}} {
		opts := s.reach(s.Shards[i]).options(nil)
		username, password, err := opts.Credentials(t.Context())
		if err != nil || username != want.username || password != want.password || opts.DB != want.db || (opts.TLS != nil) != want.isTLS {
			t.Errorf("shard %d: %q, %q, %v, database %d, TLS %v", i, username, password, err, opts.DB, opts.TLS != nil)
		}
	}
	s.TLS = new(TLS)
	if err := s.Validate(); err == nil || !strings.Contains(err.Error(), "tls does not go with the url of shard b") {
		t.Errorf("tls of the store, redis:// of a shard: %v", err)
	}
}
