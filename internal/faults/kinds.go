package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	// master is what sentinels call the primary.
	master = "limits"
	// login is the user of a shard with a password.
	login = "caddy"
	// firstPassword is that user's until it is changed.
	firstPassword = "first"
)

// downAfter is how long a primary is silent until sentinels find it down.
const downAfter = time.Second

// watched launches a primary and replicas that sentinels watch.
func watched(string) (*shard, error) {
	s, err := launchServers(2, redistest.Options{})
	if err != nil {
		return nil, err
	}
	s.sentinels, err = redistest.LaunchSentinels(master, s.primary(), 3, redistest.SentinelOptions{DownAfter: downAfter})
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.stops = append(s.stops, s.sentinels.Stop)
	line := "sentinel " + master
	for _, addr := range s.sentinels.Addrs() {
		line += " " + addr
	}
	s.config = []string{line}
	return s, nil
}

// clustered launches a Redis Cluster. With all slots evenly on three nodes, each
// has some of the clients.
func clustered(string) (*shard, error) {
	cluster, err := redistest.LaunchCluster(3, 1, lasting...)
	if err != nil {
		return nil, err
	}
	line := "cluster"
	for _, addr := range cluster.Addrs() {
		line += " " + addr
	}
	return &shard{
		servers: cluster.Nodes, cluster: cluster, config: []string{line}, stops: []func() error{cluster.Stop},
	}, nil
}

// guarded launches a primary that Caddy needs a password for.
func guarded(dir string) (*shard, error) {
	s, err := launchServers(0, redistest.Options{})
	if err != nil {
		return nil, err
	}
	s.secret = filepath.Join(dir, "password")
	if err := errors.Join(s.allow(context.Background(), firstPassword), s.tell(firstPassword)); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.describe()
	s.config = append(s.config, "username "+login, "password {file."+s.secret+"}")
	return s, nil
}

// allow makes this the only password at the primary.
func (s *shard) allow(ctx context.Context, password string) error {
	err := s.primary().Client().Do(ctx, "ACL", "SETUSER", login, "reset", "on", ">"+password, "~*", "&*", "+@all").Err()
	if err != nil {
		return fmt.Errorf("set the password: %w", err)
	}
	return nil
}

// tell gives Caddy a password.
func (s *shard) tell(password string) error {
	next := s.secret + ".next"
	if err := os.WriteFile(next, []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	return os.Rename(next, s.secret)
}

// encrypted launches a primary that speaks TLS.
func encrypted(dir string) (*shard, error) {
	authority, err := redistest.NewAuthority(dir)
	if err != nil {
		return nil, err
	}
	certificate, err := authority.IssueServer(validUntil())
	if err != nil {
		return nil, err
	}
	s, err := launchServers(0, redistest.Options{TLS: certificate, Args: []string{"--tls-auth-clients", "no"}})
	if err != nil {
		return nil, err
	}
	s.certificate = certificate
	s.describe()
	s.config = append(s.config, "tls {\nca "+authority.File()+"\n}")
	return s, nil
}

// validUntil is when certificates expire that are valid.
func validUntil() time.Time { return time.Now().Add(time.Hour) }
