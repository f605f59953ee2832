package main

import (
	"context"
	"errors"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// processFaults are those of a server's process.
var processFaults = []*fault{
	{
		name: restart, launch: static(2),
		bring: lasts(killPrimary, restartPrimary), primary: away,
	},
	{
		name: "one of two replicas killed", launch: static(2),
		bring: lasts(
			func(_ context.Context, s *shard) error { return s.replicas()[0].Kill() },
			func(_ context.Context, s *shard) error { return s.replicas()[0].Restart() }),
	},
	{
		name: "all replicas killed", launch: static(2),
		bring: lasts(
			func(_ context.Context, s *shard) error { return each(s.replicas(), (*redistest.Server).Kill) },
			func(_ context.Context, s *shard) error { return each(s.replicas(), (*redistest.Server).Restart) }),
	},
	{
		name: "whole shard killed", launch: static(2),
		bring: lasts(
			func(_ context.Context, s *shard) error { return each(s.servers, (*redistest.Server).Kill) },
			func(_ context.Context, s *shard) error { return each(s.servers, (*redistest.Server).Restart) }),
		checks: away, primary: away,
	},
	{
		name: "primary stopped (SIGSTOP)", launch: static(2),
		bring: lasts(
			func(_ context.Context, s *shard) error { return s.primary().Pause() },
			func(_ context.Context, s *shard) error { return s.primary().Resume() }),
		primary: away,
	},
	{
		name: "TLS certificate expired", launch: encrypted,
		bring:  lasts(expireCertificate, renewCertificate),
		checks: away, primary: away,
	},
}

func killPrimary(_ context.Context, s *shard) error { return s.primary().Kill() }

func restartPrimary(_ context.Context, s *shard) error { return s.primary().Restart() }

// each does something to servers, in their order.
func each(servers []*redistest.Server, do func(*redistest.Server) error) error {
	var errs []error
	for _, server := range servers {
		errs = append(errs, do(server))
	}
	return errors.Join(errs...)
}

func expireCertificate(_ context.Context, s *shard) error {
	return errors.Join(s.certificate.Renew(time.Now().Add(-time.Minute)), s.primary().Restart())
}

func renewCertificate(_ context.Context, s *shard) error {
	return errors.Join(s.certificate.Renew(validUntil()), s.primary().Restart())
}
