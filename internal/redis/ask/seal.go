package ask

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// Seal returns the form in which a text is stored that may have client keys in it: encrypted, if there is
// a secret.
func (k Keys) Seal(text string) string {
	if len(k.Secret) == 0 || text == "" {
		return text
	}
	nonce := make([]byte, nonceSize, nonceSize+len(text)+tagSize)
	_, _ = rand.Read(nonce) // never fails
	return string(k.cipher().Seal(nonce, nonce, []byte(text), nil))
}

// Unseal returns the text that Seal has made this of, or an error, which wraps [store.ErrDamaged], if that
// was under another secret.
func (k Keys) Unseal(stored string) (string, error) {
	if len(k.Secret) == 0 || stored == "" {
		return stored, nil
	}
	if len(stored) < nonceSize {
		return "", fmt.Errorf("%w: a record of %d bytes was written without the key_secret", store.ErrDamaged, len(stored))
	}
	text, err := k.cipher().Open(nil, []byte(stored[:nonceSize]), []byte(stored[nonceSize:]), nil)
	if err != nil {
		return "", fmt.Errorf("%w: a record was written under another key_secret: %w", store.ErrDamaged, err)
	}
	return string(text), nil
}

// The sizes of what AES-GCM adds to a text.
const (
	nonceSize = 12
	tagSize   = 16
)

func (k Keys) cipher() cipher.AEAD {
	mac := hmac.New(sha256.New, k.Secret)
	mac.Write([]byte("records"))
	block, _ := aes.NewCipher(mac.Sum(nil)) // a key of 32 bytes
	sealer, _ := cipher.NewGCM(block)       // a block of 16 bytes
	return sealer
}
