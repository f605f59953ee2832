// Package contrib checks the files of this folder with the packages of the programs that read them:
// Docker Compose, Kubernetes and Prometheus.
package contrib

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// objects are the kinds of the manifest, as Kubernetes's API has them.
var objects = map[metav1.TypeMeta]func() any{
	{APIVersion: "v1", Kind: "ConfigMap"}:                  func() any { return new(corev1.ConfigMap) },
	{APIVersion: "v1", Kind: "Service"}:                    func() any { return new(corev1.Service) },
	{APIVersion: "apps/v1", Kind: "Deployment"}:            func() any { return new(appsv1.Deployment) },
	{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"}: func() any { return new(policyv1.PodDisruptionBudget) },
}

// TestManifest decodes each object of the manifest into its type of Kubernetes's API, which refuses
// unknown fields and values of another type.
func TestManifest(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("kubernetes", "caddy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	decodeObjects(t, text)
}

// decodeObjects decodes one object of each kind.
func decodeObjects(t *testing.T, text []byte) {
	t.Helper()
	found := map[string]bool{}
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &kind); err != nil {
			t.Fatal(err)
		}
		object := objects[kind]
		if object == nil {
			t.Errorf("an object of kind %+v", kind)
			continue
		}
		if err := yaml.UnmarshalStrict(doc, object(), yaml.DisallowUnknownFields); err != nil {
			t.Errorf("%s: %v", kind.Kind, err)
		}
		found[kind.Kind] = true
	}
	for kind := range objects {
		if !found[kind.Kind] {
			t.Errorf("there is no %s", kind.Kind)
		}
	}
}

// TestCompose loads the compose file as Docker Compose does: by its schema, with the references
// between services, networks, volumes and secrets.
func TestCompose(t *testing.T) {
	project := loadCompose(t)
	want := []string{"caddy", "grafana", "prometheus", "redis-a1", "redis-a2", "redis-b1", "redis-b2"}
	if got := project.ServiceNames(); !slices.Equal(got, want) {
		t.Errorf("services %q, want %q", got, want)
	}
	for name, secret := range project.Secrets {
		if _, err := os.Stat(secret.File); err != nil {
			t.Errorf("the secret %s: %v", name, err)
		}
	}
}

func loadCompose(t *testing.T) *types.Project {
	t.Helper()
	file := filepath.Join("docker", "compose.yml")
	project, err := loader.LoadWithContext(t.Context(), types.ConfigDetails{
		WorkingDir: filepath.Dir(file), ConfigFiles: []types.ConfigFile{{Filename: file}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return project
}
