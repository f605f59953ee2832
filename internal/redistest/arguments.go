package redistest

import "strconv"

// config is what the server's configuration file says at first. It is for what
// the server itself changes there: Sentinel has it rewritten when it gives the
// server another role, which the server then has after a restart too.
func (s *Server) config(opts Options) []string {
	switch {
	case opts.sentinel != nil:
		return opts.sentinel
	case s.link != nil:
		return []string{"replicaof " + loopback + " " + strconv.Itoa(s.link.port.number)}
	default:
		return nil
	}
}

// arguments are redis-server's arguments after the configuration file, which
// they override.
func (s *Server) arguments(opts Options) []string {
	args := []string{
		"--save", "", "--appendonly", "no", "--dir", s.dir,
		"--daemonize", "no", "--protected-mode", "no", "--loglevel", "warning",
		// Without the delay a replica waits 5 seconds for companions.
		"--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0",
		"--replica-announce-ip", loopback,
	}
	args = append(args, s.credentials()...)
	if s.bus != nil {
		args = append(args,
			"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
			"--cluster-announce-ip", loopback, "--cluster-port", strconv.Itoa(s.bus.number),
			"--cluster-node-timeout", strconv.FormatInt(nodeTimeout.Milliseconds(), 10),
			// A replica to which its master has not sent anything yet is not named to
			// clients. Without writes that would be the ping every 10 seconds.
			"--repl-ping-replica-period", "1")
	}
	args = append(args, s.login.certificate.arguments()...)
	args = append(args, opts.Args...)

	plain, encrypted := s.port.number, 0
	if s.login.certificate != nil {
		plain, encrypted = encrypted, plain
	}
	args = append(args, "--bind", loopback, "--port", strconv.Itoa(plain))
	if encrypted != 0 {
		args = append(args, "--tls-port", strconv.Itoa(encrypted))
	}
	if opts.sentinel != nil {
		args = append(args, "--sentinel")
	}
	return args
}

// credentials are the arguments that let the server replicate. A server that
// is a primary at first may become a replica.
func (s *Server) credentials() []string {
	login := s.login
	if s.primary != nil {
		login = s.primary.login
	}
	var args []string
	if login.username != "" {
		args = append(args, "--masteruser", login.username)
	}
	if login.password != "" {
		args = append(args, "--masterauth", login.password)
	}
	return args
}

// argument is the value of the last argument of that name in args, or empty.
func argument(args []string, name string) string {
	for i := len(args) - 2; i >= 0; i-- {
		if args[i] == name {
			return args[i+1]
		}
	}
	return ""
}
