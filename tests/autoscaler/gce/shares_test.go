package gce

import (
	"encoding/json"
	"os"
	"testing"

	gce "google.golang.org/api/compute/v1"
	"k8s.io/autoscaler/cluster-autoscaler/cloudprovider/gce/localssdsize"
)

func TestShares(t *testing.T) {
	var text string
	if err := json.Unmarshal([]byte(os.Getenv("GIVEN")), &text); err != nil {
		t.Fatal(err)
	}
	builder := &GceTemplateBuilder{}
	group := &gceMig{gceRef: GceRef{Name: "gpus", Project: "project", Zone: "us-central1-b"}}
	template := &gce.InstanceTemplate{
		Name: "gpus",
		Properties: &gce.InstanceProperties{
			GuestAccelerators: []*gce.AcceleratorConfig{
				{AcceleratorType: "nvidia-h100-80gb", AcceleratorCount: 8},
			},
			MachineType: "a3-highgpu-8g",
			Metadata:    &gce.Metadata{Items: []*gce.MetadataItems{{Key: "kube-env", Value: &text}}},
			Disks: []*gce.AttachedDisk{
				{Boot: true, InitializeParams: &gce.AttachedDiskInitializeParams{DiskSizeGb: 300}},
			},
		},
	}
	env, err := ExtractKubeEnv(template)
	if err != nil {
		t.Fatal(err)
	}
	system, err := builder.MigOsInfo(group.Id(), env)
	if err != nil {
		t.Fatal(err)
	}
	node, err := builder.BuildNodeFromTemplate(group, system, template, env, 208, 1872<<30, nil, &GceReserved{},
		localssdsize.NewSimpleLocalSSDProvider())
	if err != nil {
		t.Fatal(err)
	}
	found, _ := json.Marshal(node)
	if err := os.WriteFile(os.Getenv("NODE"), found, 0o644); err != nil {
		t.Fatal(err)
	}
}
