package redistest

import (
	"errors"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/internal/process"
)

// Pause stops the server's process with SIGSTOP. The system still accepts
// connections and bytes for it, but nothing answers.
func (s *Server) Pause() error {
	return s.signal("pause", process.Pause, true)
}

// Resume lets a paused server continue; it then handles what has arrived.
func (s *Server) Resume() error {
	return s.signal("resume", process.Resume, false)
}

func (s *Server) signal(verb string, send func(pid int) error, paused bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errStopped
	if s.process != nil {
		err = s.process.signal(send)
	}
	if err != nil {
		return fmt.Errorf("%s redis-server on %s: %w", verb, s.Addr(), err)
	}
	s.paused = paused
	return nil
}

// Kill kills the server, paused or not, with SIGKILL and returns when it is
// gone. Its port stays reserved and refuses connections. Killing a killed server
// does nothing.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errStopped
	if s.process != nil {
		err = s.process.kill()
	}
	if err != nil {
		return fmt.Errorf("kill redis-server on %s: %w", s.Addr(), err)
	}
	return nil
}

// Restart kills the server unless that has happened and starts it again with
// the same port, directory and arguments. It returns when the server answers,
// within 10 seconds; a replica need not be in sync then, see [Server.WaitInSync].
// Data survives only if the arguments enable persistence; the role that Sentinel
// or a cluster has given the server does.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.restart(); err != nil {
		return fmt.Errorf("restart redis-server: %w", err)
	}
	return nil
}

func (s *Server) restart() error {
	if s.process == nil {
		return errStopped
	}
	if err := s.process.kill(); err != nil {
		return err
	}
	previous := s.process
	err := s.start()
	// The directory passes to the new watchdog, even if its server failed.
	if s.process != previous {
		err = errors.Join(err, previous.release())
	}
	return err
}
