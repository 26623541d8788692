package aws

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	autoscalingtypes "github.com/aws/aws-sdk-go-v2/service/autoscaling/types"
)

func TestShares(t *testing.T) {
	var tags map[string]string
	if err := json.Unmarshal([]byte(os.Getenv("GIVEN")), &tags); err != nil {
		t.Fatal(err)
	}
	template := &asgTemplate{InstanceType: InstanceTypes["p5.48xlarge"], Region: "us-east-1", Zone: "us-east-1a"}
	for key, value := range tags {
		template.Tags = append(template.Tags,
			autoscalingtypes.TagDescription{Key: aws.String(key), Value: aws.String(value)})
	}
	node, err := (&AwsManager{}).buildNodeFromTemplate(&asg{AwsRef: AwsRef{Name: "gpus"}}, template)
	if err != nil {
		t.Fatal(err)
	}
	found, _ := json.Marshal(node)
	if err := os.WriteFile(os.Getenv("NODE"), found, 0o644); err != nil {
		t.Fatal(err)
	}
}
