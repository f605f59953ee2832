package redistest

import "errors"

// errNoneRunning is the error of questions to a group of servers none of which
// runs.
var errNoneRunning = errors.New("none of the servers is running")

// running returns those servers that can answer.
func running(all []*Server) (some []*Server) {
	for _, s := range all {
		if s.Running() {
			some = append(some, s)
		}
	}
	return some
}

func addrs(all []*Server) []string {
	list := make([]string, len(all))
	for i, s := range all {
		list[i] = s.Addr()
	}
	return list
}

func stopAll(all []*Server) error {
	var errs []error
	for _, s := range all {
		errs = append(errs, s.Stop())
	}
	return errors.Join(errs...)
}
