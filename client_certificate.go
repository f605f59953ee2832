package shardlimit

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
)

// clientCertificate is a certificate with its key, in files that may be
// replaced. One that was read is kept until there is a better one.
type clientCertificate struct {
	files [2]string // the certificate's and the key's

	mu    sync.Mutex
	pair  *tls.Certificate
	read  [2]os.FileInfo // of the files when pair was read
	fault error          // why the files as they are now are not used
	// listeners are told the fault when it changes; listened is how many there
	// ever were.
	listeners map[int]func(fault error)
	listened  int
}

// hasChanged tells whether a file is another one than it was, or has been
// written to.
func hasChanged(was, is os.FileInfo) bool {
	return was == nil || is == nil || !os.SameFile(was, is) || !was.ModTime().Equal(is.ModTime()) || was.Size() != is.Size()
}

func loadClientCertificate(cert, key string) (*clientCertificate, error) {
	c := &clientCertificate{files: [2]string{cert, key}, listeners: map[int]func(error){}}
	c.load()
	return c, c.fault
}

// get is for [tls.Config.GetClientCertificate].
func (c *clientCertificate) get(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := text(c.fault)
	c.load()
	if text(c.fault) != before {
		for _, listen := range c.listeners {
			listen(c.fault)
		}
	}
	return c.pair, nil
}

// load reads the files, unless they are as they were when they were good.
func (c *clientCertificate) load() {
	// What changes after this is seen the next time.
	var now [2]os.FileInfo
	for i, file := range c.files {
		now[i], _ = os.Stat(file) // what is wrong is said when it is read
	}
	if c.fault == nil && !hasChanged(c.read[0], now[0]) && !hasChanged(c.read[1], now[1]) {
		return
	}
	pair, err := tls.LoadX509KeyPair(c.files[0], c.files[1])
	if err != nil {
		c.fault = fmt.Errorf("read cert %s and key %s: %w", c.files[0], c.files[1], err)
		return
	}
	c.pair, c.read, c.fault = &pair, now, nil
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// listen calls f, until stop is called, when the files cannot be used and the
// certificate read before is, and, with nil, when they can again.
func (c *clientCertificate) listen(f func(fault error)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listened++
	id := c.listened
	c.listeners[id] = f
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, id)
	}
}
